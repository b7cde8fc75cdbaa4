#!/bin/bash
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@CPUS@
@OPTIONS@#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@@GRACE@

# Written by `tidewheel slurm render`: a Ray cluster over the nodes of the job, and a training run on it.
# The exit code is the run's: 0 finished, 2 a user error, 143 stopped after a save.
# A job that Slurm preempts, or that reaches its time limit, saves, is requeued, and resumes.
set -euo pipefail
umask 077

state="@STATE@/$SLURM_JOB_ID" # every node must see this folder
interface="@INTERFACE@"       # network interface of the cluster; empty: the address of the node's name
port=$((20000 + SLURM_JOB_ID % 10000))
@SETUP@
rm -rf "$state" # of the time before a requeue
mkdir -p "$state"
cat > "$state/run.yaml" <<'TIDEWHEEL_RUN'
@CONFIG@TIDEWHEEL_RUN

# Ray's processes refuse everyone without this token. There is no dashboard.
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$state/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$state/token" RAY_USAGE_STATS_ENABLED=0
start=@START@
export TIDEWHEEL_START="$start" TIDEWHEEL_STATE_FOLDER="$state" TIDEWHEEL_INTERFACE="$interface" TIDEWHEEL_PORT="$port"

# One of these per node. It finds the address of its node and starts Ray there.
cat > "$state/node.sh" <<'TIDEWHEEL_NODE'
set -euo pipefail
state="$TIDEWHEEL_STATE_FOLDER"
if [ "$SLURM_JOB_NUM_NODES" -eq 1 ] && [ "$TIDEWHEEL_START" = symmetric-run ]; then
    address=127.0.0.1
elif [ "$SLURM_JOB_NUM_NODES" -eq 1 ]; then
    address=127.0.0.2 # a driver takes 127.0.0.1 for the outside address of the machine
elif [ -n "$TIDEWHEEL_INTERFACE" ]; then
    address="$(ip -4 -o address show dev "$TIDEWHEEL_INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }')"
else
    address="$(getent ahostsv4 "${SLURMD_NODENAME:-$(hostname)}" | awk '{ print $1; exit }')"
fi
case "$address" in
    "" | 127.0.1.1) echo "no address of this node; render with --interface, such as ib0 or eth0" >&2 && exit 2 ;;
esac
folder="/tmp/tw-$SLURM_JOB_ID"
mkdir -p "$folder"
options=("--num-cpus=@CPUS@" "--num-gpus=@GPUS@" "--node-ip-address=$address" --min-worker-port=0 --max-worker-port=0
    --dashboard-agent-listen-port=0 --disable-usage-stats --block)
if [ "$SLURM_NODEID" -eq 0 ]; then
    echo "$address:$TIDEWHEEL_PORT" > "$state/address.new" && mv "$state/address.new" "$state/address"
fi
if [ "$TIDEWHEEL_START" = symmetric-run ]; then # it knows the head by its address, and runs the driver there
    until [ -e "$state/address" ]; do sleep 1; done
    export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
    exec ray symmetric-run --address "$(cat "$state/address")" --min-nodes "$SLURM_JOB_NUM_NODES" \
        "--num-cpus=@CPUS@" "--num-gpus=@GPUS@" --min-worker-port=0 --max-worker-port=0 --include-dashboard=false \
        --disable-usage-stats -- bash "$state/driver.sh"
fi
if [ "$SLURM_NODEID" -eq 0 ]; then
    exec ray start --head "--port=$TIDEWHEEL_PORT" "--temp-dir=$folder" --include-dashboard=false "${options[@]}"
fi
for _ in $(seq 300); do
    if [ -e "$state/address" ]; then
        head="$(cat "$state/address")"
        if (exec 3<> "/dev/tcp/${head%:*}/${head##*:}") 2> "$state/waiting.$SLURM_NODEID"; then
            exec ray start "--address=$head" "${options[@]}"
        fi
    fi
    sleep 1
done
echo "the head did not start within 300 s" >&2
exit 1
TIDEWHEEL_NODE

# The run: its process id and its exit code go to files, as `ray symmetric-run` starts it elsewhere.
cat > "$state/driver.sh" <<'TIDEWHEEL_DRIVER'
state="$TIDEWHEEL_STATE_FOLDER"
head="$(cat "$state/address")"
RAY_ADDRESS="$head" tidewheel train "$state/run.yaml" --address "$head" &
echo $! > "$state/driver"
code=0
wait $! || code=$?
echo "$code" > "$state/code"
exit "$code"
TIDEWHEEL_DRIVER

if [ "$start" = symmetric-run ] && ! ray symmetric-run --help > "$state/waiting" 2>&1; then
    echo "this Ray has no symmetric-run; render with --start nodes" >&2
    exit 2
fi

# A node that is lost must not end the others: the run goes on without it.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 \
    --no-kill bash "$state/node.sh" &
nodes=$!

requeue=no
# shellcheck disable=SC2329 # traps call it
stop() { # save and end: the first SIGTERM to the driver does both
    echo "$1: the run saves and stops"
    if [ -e "$state/driver" ]; then
        kill -TERM "$(cat "$state/driver")" || true
    else
        kill -TERM "$nodes" || true
    fi
}
finished() { # wait for a child, also when a trap interrupts the wait; its code is in $code
    code=0
    wait "$1" || code=$?
    while kill -0 "$1" 2> "$state/waiting"; do
        code=0
        wait "$1" || code=$?
    done
}
trap 'requeue=yes; stop "the time limit is near"' USR1
trap 'stop "Slurm ends the job"' TERM

if [ "$start" = symmetric-run ]; then
    finished "$nodes"
else
    for _ in $(seq 300); do
        if [ -e "$state/address" ]; then
            head="$(cat "$state/address")"
            if (exec 3<> "/dev/tcp/${head%:*}/${head##*:}") 2> "$state/waiting"; then break; fi
        fi
        if ! kill -0 "$nodes"; then
            echo "Ray did not start on the nodes" >&2
            exit 1
        fi
        sleep 1
    done
    bash "$state/driver.sh" &
    finished $!
    kill -TERM "$nodes" || true
    wait "$nodes" || true
fi
if [ -e "$state/code" ]; then code="$(cat "$state/code")"; fi
rm -f "$state/token"
if [ "$requeue" = yes ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
