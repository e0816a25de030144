#!/usr/bin/env bash
# Upload the W&B runs that jobs have recorded offline, from a node with a network. --help below.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: launch/sync_wandb.sh [options] [DIRECTORY ...]

Finds every W&B run below DIRECTORY (default: .) that was not uploaded, and uploads them, oldest first: the parts of a run
that was interrupted continue each other, as one run. What is uploaded is marked and left alone the next time, so this
may run as often as you like, also while jobs are running.

  --limit SECONDS   for one run (default: 600); the client itself does not give up on a server that does not answer
  --idle MINUTES    leave out what was written to within these (default: 2): a job may be at it
  --dry_run         print the commands and stop
  -h, --help        this text

Also by environment: WANDB (the command, default: wandb), SYNC_LIMIT, SYNC_IDLE; and W&B's own, WANDB_API_KEY above all.
USAGE
}

fail() { echo "sync_wandb.sh: error: $1" >&2; exit 2; }
value() { [[ $# -ge 2 && $2 =~ ^[0-9]+$ ]] || fail "$1 needs a number"; }

limit=${SYNC_LIMIT:-600} idle=${SYNC_IDLE:-2} dry_run=''
while [[ $# -gt 0 ]]; do
    case $1 in
        --limit) value "$@"; limit=$2; shift 2 ;;
        --idle) value "$@"; idle=$2; shift 2 ;;
        --dry_run) dry_run=1; shift ;;
        -h|--help) usage; exit 0 ;;
        --) shift; break ;;
        -*) fail "$1 is no option: see --help" ;;
        *) break ;;
    esac
done
[[ $# -gt 0 ]] || set -- .
for directory in "$@"; do [[ -d $directory ]] || fail "$directory is no directory"; done
wandb=${WANDB:-wandb}
[[ -n $dry_run ]] || command -v "$wandb" >/dev/null || fail "$wandb was not found: activate the environment of gradiend_dist, or set WANDB"

# Names tell the start: offline-run-YYYYMMDD_HHMMSS-ID/run-ID.wandb. Lines "START<tab>FILE", of which the second part counts.
runs() {
    local file start
    find "$@" -type f -name 'run-*.wandb' -path '*run-[0-9]*_[0-9]*-*/*' -mmin "+$idle" -print0 |
        while IFS= read -r -d '' file; do
            [[ ! -e $file.synced ]] || continue
            start=$(basename "$(dirname "$file")")
            start=${start#offline-}
            printf '%s\t%s\0' "${start#run-}" "$file"
        done | sort -z
}

count=0 left=0
while IFS=$'\t' read -r -d '' _ file; do
    command=(timeout "$limit" "$wandb" sync --include-online "$file")
    printf '%q ' "${command[@]}"; echo
    [[ -z $dry_run ]] || continue
    output=$("${command[@]}" 2>&1) || true
    printf '%s\n' "$output"
    # Of a job that was killed in the middle of a row, all rows before it are uploaded; again, they would be there twice.
    [[ $output != *"incomplete record"* ]] || touch "$file.synced"
    if [[ -e $file.synced ]]; then count=$((count + 1)); else left=$((left + 1)); echo "sync_wandb.sh: not uploaded: $file" >&2; fi
done < <(runs "$@")
[[ -n $dry_run ]] || echo "sync_wandb.sh: $count uploaded, $left left"
[[ $left -eq 0 ]]
