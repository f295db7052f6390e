#!/bin/bash
# Trains one run on several machines under SLURM, and requeues the job when its time is over. UNTESTED on a cluster.
#
#   sbatch examples/slurm.sh lm data.text=/shared/text.txt train.shard=true
#
# All machines must see the same folder. torchrun's id is that of the SLURM job, which a requeue keeps: the same command
# then goes on with its own run, in the same bits.
#SBATCH --job-name=regard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -u

RUN=${RUN:-runs/slurm-$SLURM_JOB_ID}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
requeue=no

# Five minutes before the end SLURM signals this script alone. It passes SIGTERM on to the processes, which save and end.
stop() {
    requeue=yes
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop USR1

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds to save: torchrun kills its processes after 30 unless told otherwise
srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m regard train "$@" --device cuda --out "$RUN" &
training=$!
wait "$training"
status=$?
if [ "$requeue" = yes ]; then  # the signal ended that wait before the training
    wait "$training"
    status=$?
fi

if [ "$requeue" = yes ] && [ ! -e "$RUN/model/config.json" ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
