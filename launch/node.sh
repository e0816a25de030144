#!/usr/bin/env bash
# What srun runs on each node: the launcher of its ranks. node.sh LAUNCH COMMAND ... -- WHAT IS LAUNCHED ...
#
# Signals. Slurm tells only this process, the step's own child, where processes are tracked by cgroups, and nobody tells
# the ranks. The launcher, told to stop, would kill the ranks of this node while those of others still save. So it
# ignores the signals, and this shell hands them to the ranks, which save their state together and end by themselves.
set -uo pipefail

launch=()
while [[ $1 != -- ]]; do launch+=("$1"); shift; done
shift
export PET_SIGNALS_TO_HANDLE=SIGQUIT   # of torchrun, which wants at least one
own=$RANK_LOGS/.node_$SLURM_NODEID

# Where this host's name means itself alone (127.0.1.1 in /etc/hosts), gloo would listen where no other node can reach
# it: it listens where the way to another node begins.
way_to_others() {
    local first second other address
    read -r first second <<<"$FIRST_NODES"
    [[ $SLURM_NODEID -eq 0 ]] && other=$second || other=$first
    address=$(getent hosts "$other" | awk '{ print $1; exit }')
    [[ $address != 127.* ]] || return 0
    ip -o route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p'
}
if [[ $SLURM_JOB_NUM_NODES -gt 1 && -z ${GLOO_SOCKET_IFNAME:-} && $(getent hosts "$(hostname)") == 127.* ]]; then
    interface=$(way_to_others)
    [[ -z $interface ]] || export GLOO_SOCKET_IFNAME=$interface
fi
mkdir -p "$own"

trap '' TERM USR1 USR2   # inherited by the launcher; ranks set handlers of their own
sort_out() {   # line by line: awk and grep would hold them back
    local line
    while IFS= read -r line; do
        if [[ $line == "[node"[0-9]*:[0-9]*"]:"* ]]; then printf '%s\n' "$line" >&2; else printf '%s\n' "$line" >>"$1"; fi
    done
}
if [[ $((SLURM_JOB_NUM_NODES * RANKS_PER_NODE)) -eq 1 ]]; then   # one process has no torchrun that keeps its logs
    "${launch[@]}" "$@" > >(tee "$RANK_LOGS/rank_0.out") 2> >(tee "$RANK_LOGS/rank_0.err" >&2) &
else
    # Lines of ranks come as [nodeR:L]:. What the launcher itself says of a rank that failed is a page long and names no
    # reason: it goes to a file.
    "${launch[@]}" --machine_rank "$SLURM_NODEID" --log_dir "$own" --tee 3 --role "node$SLURM_NODEID:" "$@" \
        2> >(sort_out "$RANK_LOGS/launcher_$SLURM_NODEID.err") &
fi
launcher=$!

below() { local child; for child in $(pgrep -P "$1"); do echo "$child"; below "$child"; done; }
told=0
tell() { told=$((told + 1)); below "$launcher" | xargs -r kill -USR1 2>/dev/null; }
trap tell TERM USR1 USR2

# torchrun names its log directories at random: each rank's files get names that are known.
name_logs() {
    local rank file kind
    for rank in $(seq 0 $((RANKS_PER_NODE - 1))); do
        for kind in out err; do
            file=$(compgen -G "$own/*/attempt_0/$rank/std$kind.log" | head -n 1)
            [[ -z $file ]] || ln -sf "${file#"$RANK_LOGS/"}" "$RANK_LOGS/rank_$((SLURM_NODEID * RANKS_PER_NODE + rank)).$kind"
        done
    done
}
(sleep 15; name_logs) &
naming=$!

before=-1
while [[ $told -ne $before ]]; do   # a signal ends `wait` early, the launcher does not
    before=$told
    wait "$launcher"
    code=$?
done
kill "$naming" 2>/dev/null
name_logs
exit "$code"
