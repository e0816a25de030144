#!/usr/bin/env bash
# Train on one machine: one process with the documented placement, or one process per GPU.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: launch/single_node.sh [options] [--] ARGUMENTS OF gradiend_dist.train

  --engine NAME       single (default): one process; 0 GPUs all on the CPU, 1 all on it, 2 the decoder on the second,
                      3 or more the base model on the third
                      multi_gpu, fsdp2, zero1, zero2, zero3, zero3_offload, cpu_2: accelerate_configs/NAME.yaml
  --num_processes N   processes (default: the GPUs that nvidia-smi shows, 2 for cpu_2, 1 for single)
  --config_file FILE  another Accelerate configuration instead of --engine
  --dry_run           print the command and stop
  -h, --help          this text

Also by environment: ENGINE, NUM_PROCESSES; ACCELERATE and GRADIEND_DIST, the commands (accelerate, gradiend-dist).
Example: launch/single_node.sh --engine multi_gpu -- --config run.yaml --experiment_dir runs/gender
USAGE
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
engine=${ENGINE:-single}
processes=${NUM_PROCESSES:-}
config=
dry_run=

fail() { echo "single_node.sh: error: $1" >&2; exit 2; }
value() { [[ $# -ge 2 && -n $2 ]] || fail "$1 needs a value"; }

while [[ $# -gt 0 ]]; do
    case $1 in
        --engine) value "$@"; engine=$2; shift 2 ;;
        --num_processes) value "$@"; processes=$2; shift 2 ;;
        --config_file) value "$@"; config=$2; shift 2 ;;
        --dry_run) dry_run=1; shift ;;
        -h|--help) usage; exit 0 ;;
        --) shift; break ;;
        *) break ;;   # the first argument of the training
    esac
done

config=${config:-$root/accelerate_configs/$engine.yaml}
[[ -f $config ]] || fail "$config does not exist: choose --engine single, multi_gpu, fsdp2, zero1, zero2, zero3, zero3_offload or cpu_2, or pass --config_file"
[[ $# -gt 0 ]] || fail "the arguments of the training are missing, e.g. -- --config run.yaml"
if [[ -z $processes ]]; then
    case $engine in
        single) processes=1 ;;
        cpu_2) processes=2 ;;
        *) processes=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l) ;;
    esac
fi
[[ $processes =~ ^[1-9][0-9]*$ ]] || fail "--num_processes $processes: no GPU was found; pass a number of processes, or --engine single"

# torchrun's --signals-to-handle by environment, since accelerate has no such flag.
# The launcher hands these on to every rank, which saves its state and ends; the same command then goes on.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}   # seconds to save in, then they are killed
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}   # sizes of weights differ
# What each rank waits for where NCCL gives up, written to the working directory.
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-true}
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-nccl_rank_}
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2}
command=("${ACCELERATE:-accelerate}" launch --quiet --config_file "$config" --num_processes "$processes" -m gradiend_dist.train "$@")
[[ $engine != single || $processes -eq 1 ]] || fail "--engine single is one process and --num_processes is $processes: choose multi_gpu, or leave it out"
# One process needs no launcher, which would end on a signal and leave it alone with its state.
[[ $config != "$root/accelerate_configs/single.yaml" ]] || command=("${GRADIEND_DIST:-gradiend-dist}" train "$@")
printf '%q ' "${command[@]}"; echo
[[ -n $dry_run ]] || exec "${command[@]}"
