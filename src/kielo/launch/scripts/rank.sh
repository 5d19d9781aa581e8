#!/bin/bash
# One task of a job: job.sh starts it on every node, inside the container if there is any.
# rank.sh FOLDER ATTEMPT --rank | --torchrun SECONDS | --preflight | --versions | --decide CODE REFUSAL
FOLDER=$1 ATTEMPT=$2 what=$3
# shellcheck source=/dev/null
. "$FOLDER/environment.sh"
# shellcheck source=/dev/null
. "$ATTEMPT/meeting.sh"
# shellcheck source=/dev/null
if [ -n "$VENV" ]; then . "$VENV/bin/activate"; fi

if [ "$what" = --versions ]; then
    "${KIELO[@]}" --version
    "${PYTHON[@]}" -m pip list --format freeze 2> /dev/null
    exit 0
fi
if [ "$what" = --decide ]; then exec "${DECIDE[@]}" "$FOLDER" "$ATTEMPT" "$4" "$5"; fi

# Only here are the numbers of this task known: the batch script has one task's numbers for all.
RANK=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:?no srun and no mpirun started this}}
LOCAL_RANK=${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-}}
exec >> "$ATTEMPT/${SLURMD_NODENAME:-$(hostname -s)}.$(printf %05d "$RANK").log" 2>&1
echo "task $RANK ($LOCAL_RANK on $(hostname)): cores $(sed -n 's/^Cpus_allowed_list:\t*//p' "/proc/$$/status"), devices ${ROCR_VISIBLE_DEVICES:-${CUDA_VISIBLE_DEVICES:-all}}"
if [ "$RANK" = 0 ]; then
    env | grep -E '^(MASTER|NCCL|RCCL|FI|CXI|UCX|UB|GLOO|HSA|MIOPEN|MPICH|CUDA|PYTORCH|TORCH|TRITON|OMP|HF|WANDB|SLURM_CPU_BIND)' | grep -vE '^[^=]*(TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH)[^=]*=' | sed 's,://[^/@]*@,://...@,' | sort
    export KIELO_REFUSAL_FILE=$ATTEMPT/refusal.txt
    export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_DEBUG_SUBSYS=${NCCL_DEBUG_SUBSYS:-INIT,NET} # names the network
fi

if [ "$what" = --torchrun ]; then
    # By default torchrun would die of SIGUSR1 and leave its workers behind. From torch 2.13 it passes the signal on and gives
    # them time. Before, it would kill them after 30 seconds, so it ignores the signal, which Slurm sends to the workers too.
    signals=(--signals-to-handle='SIGTERM,SIGINT,SIGUSR1')
    if "${TORCHRUN[@]}" --help | grep -q -e --shutdown-timeout; then
        signals+=(--shutdown-timeout="$4")
    elif [ -n "${SLURM_PROCID:-}" ]; then
        trap '' USR1
        signals=(--signals-to-handle='SIGTERM,SIGINT')
    fi
    exec "${TORCHRUN[@]}" --nnodes="$NODES" --nproc-per-node="$DEVICES_PER_NODE" --node-rank="$RANK" \
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0 \
        "${signals[@]}" \
        --no-python "${KIELO[@]}" "${COMMAND[@]}"
fi

# Caches of compilers: each rank's own, on the node, because the shared file system is slow and its locks fail.
export TRITON_CACHE_DIR=$CACHES/$LOCAL_RANK/triton TORCHINDUCTOR_CACHE_DIR=$CACHES/$LOCAL_RANK/inductor
export MIOPEN_USER_DB_PATH=$CACHES/$LOCAL_RANK/miopen MIOPEN_CUSTOM_CACHE_DIR=$CACHES/$LOCAL_RANK/miopen
mkdir -p "$MIOPEN_USER_DB_PATH"
export RANK LOCAL_RANK WORLD_SIZE=$((NODES * DEVICES_PER_NODE))
if [ "$what" = --preflight ]; then exec "${KIELO[@]}" preflight "$FOLDER/recipe.toml"; fi
# In place of this shell, so that a signal reaches Python, and its exit code is the task's.
exec "${KIELO[@]}" "${COMMAND[@]}"
