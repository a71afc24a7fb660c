#!/bin/sh
# The arms of the paper's tables, one after the other, each in a run folder of its own:
#
#   arms.sh RECIPE [KEY=VALUE]...
#
# An arm that is finished is not run again.
set -eu
recipe=${1:?"name a recipe: qwen2.5-3b, qwen2.5-3b-instruct, qwen2.5-7b or qwen2.5-7b-instruct"}
shift
here=$(dirname "$0")

arm() {
    name=$recipe-$1
    shift
    [ -e "runs/$name/finished" ] && return
    "$here/launch.sh" "$recipe" run.name="$name" "$@" && touch "runs/$name/finished"
}

arm grpo llds.coef=0 "$@"
arm grpo+llds "$@"
arm grpo+llds-ma llds.mask_answer=true "$@"
# GSPO averages over responses and has the clip range of its paper.
arm gspo llds.coef=0 grpo.importance=sequence grpo.loss=grpo grpo.clip_low=3e-4 grpo.clip_high=4e-4 "$@"
arm gspo+llds grpo.importance=sequence grpo.loss=grpo grpo.clip_low=3e-4 grpo.clip_high=4e-4 "$@"
