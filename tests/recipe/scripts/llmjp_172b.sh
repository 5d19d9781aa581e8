#!/bin/bash
# Written for Kielo's tests, with the arguments of LLM-jp 172B as it published them. Not the script of the run.
#SBATCH --job-name=llmjp-172b
#SBATCH --partition=gpu
#SBATCH --nodes=64
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8

set -eu -o pipefail
source environment/activate.sh

NUM_GPUS=$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE))
TP=4
PP=16
DP=$((NUM_GPUS / (TP * PP)))
echo "data parallel: ${DP}"

WARMUP=2000
DECAY=290812
ITERS=$((WARMUP + DECAY))

DATA=/corpus/v3
BLEND=""
BLEND="${BLEND} 23783124862 ${DATA}/ja/cc_0000_text_document"
BLEND="${BLEND} 2563804308 ${DATA}/ja/wiki_0000_text_document"
BLEND="${BLEND} 17052861266 ${DATA}/en/c4_0000_text_document"
BLEND="${BLEND} 4744259830 ${DATA}/en/wiki_0000_text_document"
BLEND="${BLEND} 14486363187 ${DATA}/code/stack_0000_text_document"

CHECKPOINTS=checkpoints/tp${TP}-pp${PP}
LOAD_ARGS="--load ${CHECKPOINTS}"

export CUDA_DEVICE_MAX_CONNECTIONS=1
mpirun -np ${NUM_GPUS} --npernode 8 -x MASTER_ADDR \
  python Megatron-LM/pretrain_gpt.py \
  --tensor-model-parallel-size ${TP} \
  --pipeline-model-parallel-size ${PP} \
  --context-parallel-size 1 \
  --sequence-parallel \
  --use-distributed-optimizer \
  --num-layers 96 \
  --hidden-size 12288 \
  --ffn-hidden-size 38464 \
  --num-attention-heads 96 \
  --group-query-attention \
  --num-query-groups 16 \
  --seq-length 4096 \
  --max-position-embeddings 4096 \
  --micro-batch-size 1 \
  --global-batch-size 1728 \
  --train-iters ${ITERS} \
  --tokenizer-type Llama2Tokenizer \
  --tokenizer-model tokenizer/llm-jp.model \
  ${LOAD_ARGS} \
  --save ${CHECKPOINTS} \
  --data-path ${BLEND} \
  --split 1000,0,0 \
  --init-method-std 0.02 \
  --lr 8e-5 \
  --min-lr 8e-6 \
  --lr-decay-style cosine \
  --lr-decay-iters ${DECAY} \
  --lr-warmup-iters ${WARMUP} \
  --weight-decay 0.1 \
  --clip-grad 1 \
  --optimizer adam \
  --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 \
  --log-interval 1 \
  --eval-interval ${ITERS} \
  --eval-iters 0 \
  --bf16 \
  --untie-embeddings-and-output-weights \
  --position-embedding-type rope \
  --disable-bias-linear \
  --normalization RMSNorm \
  --norm-epsilon 1e-5 \
  --swiglu \
  --attention-dropout 0.0 --hidden-dropout 0.0 \
  --use-flash-attn \
  --recompute-activations \
  --use-z-loss \
  --log-throughput \
  --wandb-project llmjp
