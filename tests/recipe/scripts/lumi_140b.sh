#!/bin/bash
# Written for Kielo's tests, with what CSC's post on scaling publishes; its dimensions are not published.
#SBATCH --partition=standard-g
#SBATCH --nodes=768
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
HIDDEN=12288; LAYERS=88
srun python pretrain_gpt.py --num-layers $LAYERS --hidden-size $HIDDEN --ffn-hidden-size 32768 \
    --num-attention-heads $((HIDDEN / 128)) --group-query-attention --num-query-groups 8 \
    --seq-length 5120 --max-position-embeddings 5120 --normalization RMSNorm --swiglu --disable-bias-linear \
    --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 131072 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel \
    --micro-batch-size 1 --global-batch-size 768 --train-iters 100 --lr 1e-4 --bf16 --adam-beta2 0.95 \
    --weight-decay 0.1 --hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer --mock-data
