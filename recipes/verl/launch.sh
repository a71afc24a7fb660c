#!/bin/sh
# One run on one machine or many, from the same recipe:
#
#   launch.sh RECIPE [KEY=VALUE]...                      # on one machine
#   HEAD=10.0.0.1 NODES=4 launch.sh RECIPE [KEY=VALUE]...   # the same line on each of four machines
#
# The machine whose address is $HEAD starts the run; the others lend their GPUs until it is over. llds[verl] must be
# installed on each, at the same path, and the run folder must lie on a disk that all of them share.
set -eu
recipe=${1:?"name a recipe: qwen2.5-3b, qwen2.5-3b-instruct, qwen2.5-7b or qwen2.5-7b-instruct"}
shift
nodes=${NODES:-1}
port=${PORT:-6379}

if [ "$nodes" -eq 1 ]; then
    exec llds train "$recipe" "$@"
fi

alive() {
    python -c "import ray; ray.init('$head:$port', logging_level='ERROR'); print(sum(n['Alive'] for n in ray.nodes()))"
}

head=${HEAD:?"with NODES above 1, HEAD is the address of the machine that starts the run"}
if hostname -I | tr ' ' '\n' | grep -qxF "$head"; then
    ray start --head --node-ip-address="$head" --port="$port"
    trap 'ray stop' EXIT
    # Machines that never come must not leave the others waiting for ever.
    tries=0
    until [ "$(alive)" -ge "$nodes" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt "${TRIES:-120}" ] || { echo "Fewer than $nodes machines came; see their output." >&2; exit 1; }
        sleep 5
    done
    RAY_ADDRESS="$head:$port" llds train "$recipe" scale.nodes="$nodes" "$@"
else
    until ray start --address="$head:$port" --block; do sleep 5; done
fi
