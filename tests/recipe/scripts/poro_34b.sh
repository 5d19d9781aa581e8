#!/bin/bash
# Written for Kielo's tests, with what Poro 34B's card and FinGPT's relatives publish. Not the script of the run.
#SBATCH --partition=standard-g
#SBATCH --nodes=128
#SBATCH --gpus-per-node=mi250:8
#SBATCH --ntasks-per-node=8
if [ -z $SLURM_JOB_ID ]; then
    sbatch "$0"
    exit
fi
SAMPLES=$((1000000000000 / 2048))
ARGS=(
    --num-layers 54 --hidden-size 7168 --num-attention-heads 56
    --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 1 --global-batch-size 2048
    --train-samples "$SAMPLES"
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine
    --lr-decay-samples "$SAMPLES" --lr-warmup-samples 183105
    --adam-beta2 0.95 --weight-decay 0.1
    --init-method-std 0.0048 --embed-layernorm --bf16
    --attention-dropout 0 --hidden-dropout 0
    --position-embedding-type alibi   # as BLOOM
    --checkpoint-activations
)
ARGS+=(--tokenizer-type GPT2BPETokenizer --vocab-file tok/vocab.json --merge-file tok/merges.txt --vocab-size 128000)
cat > ds.json <<EOF
{"train_batch_size": 2048, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}
EOF
srun --cpu-bind=none singularity exec "$SIF" python pretrain_gpt.py \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 \
    "${ARGS[@]}" --deepspeed --deepspeed_config ds.json --zero-stage 1 \
    --train-data-path 3 data/fi 6 data/en 1 data/code
