#!/bin/sh
# Any example on the devices of this node, or of several, under torchrun:
#   examples/torchrun.sh examples/full.yaml --trainer.accelerator=gpu --trainer.devices=8
# On each of four nodes:
#   NNODES=4 HEAD=node0 examples/torchrun.sh examples/full.yaml --trainer.accelerator=gpu --trainer.devices=8 --trainer.num_nodes=4
set -eu
config=$1
shift
devices=${DEVICES:-$(printf '%s\n' "$@" | sed -n 's/^--trainer.devices=//p')}
exec torchrun --nnodes="${NNODES:-1}" --nproc-per-node="${devices:-2}" \
    --rdzv-backend=c10d --rdzv-endpoint="${HEAD:-localhost}:${PORT:-0}" \
    -m lightning_automodel.cli fit --config="$config" "$@"
