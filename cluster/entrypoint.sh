#!/bin/bash
# Raise what Ray needs, then become the command: signals reach it, and its exit code is the container's.
set -euo pipefail
files=$(ulimit -Hn)
if [ "$files" = unlimited ] || [ "$files" -gt 65536 ]; then files=65536; fi
ulimit -Sn "$files"
exec "$@"
