# Written for Kielo's tests, with the arguments of Llammas-base as TartuNLP published them. Not the script of the run.
data_path=text
run_name=llama-2-7b-estonian
export WANDB_PROJECT=llammas

port=$(( RANDOM % (50000 - 30000 + 1 ) + 30000 ))
accelerate launch --main_process_port ${port} --config_file llammas_7b.yaml finetune.py \
    --model_name "meta-llama/Llama-2-7b-hf" \
    --low_cpu_mem_usage \
    --train_path "${data_path}/culturax_et,uonlp/CulturaX:en" \
    --interleave_probs 0.75,0.25 \
    --report_to "wandb" \
    --seed 42 \
    --max_seq_len 1024 \
    --max_steps 19080 \
    --eval_steps 1272 --save_steps 1272 \
    --output_dir "checkpoints/${run_name}" \
    --logging_steps 25 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 2 \
    --gradient_checkpointing True \
    --learning_rate 2e-5 \
    --lr_scheduler_type "polynomial" \
    --scheduler_lr_end 2e-6 \
    --bf16 True \
    --weight_decay 0.1
