#!/bin/bash
# Written for Kielo's tests, with what Viking's card publishes and Llama 2's settings. Not the script of the run.
#SBATCH -p standard-g
#SBATCH -N 32
#SBATCH --gpus-per-node=8
GPUS_PER_NODE=8
MASTER_ADDR=${MASTER_ADDR:-localhost}
WORLD_SIZE=$(($GPUS_PER_NODE*${SLURM_NNODES}))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $SLURM_NNODES
    --master_addr $MASTER_ADDR
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --position-embedding-type rope
    --untie-embeddings-and-output-weights
)
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 1024
    --train-iters 476837
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.02
    --clip-grad 1.0
    --bf16
    --lr 3.0e-4
    --lr-decay-style cosine
    --min-lr 3.0e-5
    --lr-warmup-iters 2000
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --sequence-parallel
)
VOCABULARY="--vocab-size 131072 --make-vocab-size-divisible-by 128"
if ((WORLD_SIZE > 128)); then
    VOCABULARY+=" --use-distributed-optimizer"
fi
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" $VOCABULARY \
    --tensor-model-parallel-size 2 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model LumiOpen/Viking-7B \
    --data-path /text/nordic_text_document --split 99,1,0 \
    --save-interval 1000 --eval-interval 1000 --eval-iters 10 --log-interval 100
