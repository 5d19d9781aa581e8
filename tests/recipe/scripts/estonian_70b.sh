#!/bin/bash
# Written for Kielo's tests: Llama 3.1 70B continued on LUMI at tensor 8 × pipeline 4, as seed 000 tried it.
#SBATCH --partition=standard-g
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
srun python finetune_llama.py --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 \
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 \
    --seq-length 4096 --max-position-embeddings 131072 --normalization RMSNorm --swiglu --disable-bias-linear \
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling \
    --untie-embeddings-and-output-weights --vocab-size 128256 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 2000 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --bf16 --adam-beta2 0.95 --weight-decay 0.1 --hidden-dropout 0 --attention-dropout 0 \
    --use-distributed-optimizer --load /models/llama31-70b-tp8-pp4 --save checkpoints --finetune --no-load-optim \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-70B \
    --data-path 0.75 data/et_text_document 0.25 data/en_text_document
