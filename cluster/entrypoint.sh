#!/bin/bash
# Raise the limit on open files for Ray, then exec the command: it gets signals, and its exit code is the container's.
set -euo pipefail
files=$(ulimit -Hn)
if [ "$files" = unlimited ] || [ "$files" -gt 65536 ]; then files=65536; fi
ulimit -Sn "$files"
exec "$@"
