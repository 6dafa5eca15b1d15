#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=SIGUSR1@300
# Any example on a cluster with SLURM: sbatch examples/slurm.sh examples/full.yaml [--model.model=... --data.train_files=...]
# One task per GPU. Five minutes before its time is over the run saves a checkpoint and asks for the next job.
set -eu
config=$1
shift
srun lightning-automodel fit --config="$config" --trainer.accelerator="${ACCELERATOR:-gpu}" \
    --trainer.devices="$SLURM_NTASKS_PER_NODE" --trainer.num_nodes="$SLURM_NNODES" "$@"
