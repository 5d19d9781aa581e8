#!/bin/bash
# Written for Kielo's tests, with what the paper on Llama-SMUGRI publishes of its first stage. Not the script of the run.
set -e
cat > fsdp.yaml <<EOF
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
mixed_precision: bf16
num_machines: ${NODES:-1}
num_processes: $((8 * ${NODES:-1}))
EOF
accelerate launch --config_file=fsdp.yaml run_clm.py \
    --model_name_or_path meta-llama/Llama-2-7b-hf \
    --train_file text/fu.jsonl \
    --block_size 2048 \
    --max_steps 19080 --save_steps 477 --eval_steps 477 \
    --per_device_train_batch_size 16 --gradient_accumulation_steps 2 \
    --learning_rate 4e-5 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr": 4e-6}' \
    --warmup_ratio 0.01 --weight_decay 0.05 --bf16 --gradient_checkpointing \
    --output_dir out
