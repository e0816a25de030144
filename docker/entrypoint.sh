#!/bin/sh
# Entry point of the images: look for the GPU, then become the command, so that signals reach it and not a shell.
set -eu

if [ "${GRADIEND_DIST_IMAGE:-cpu}" = cuda ] && [ "${GRADIEND_DIST_CPU_OK:-0}" != 1 ]; then
    python "$(dirname "$(readlink -f "$0")")/gpu_check.py"
fi
exec "$@"
