#!/usr/bin/env bash
# Install Slurm for tests/slurm on Debian or Ubuntu; no daemon is started. Run it as root; a second run changes nothing.
set -euo pipefail

fail() { echo "install.sh: error: $1" >&2; exit 2; }

PATH=$PATH:/usr/sbin:/sbin
complete() { local name; for name in munged slurmctld slurmd sbatch; do command -v "$name" >/dev/null || return 1; done; }
if complete; then
    echo "install.sh: already there: $(slurmd -V)"
    exit 0
fi
command -v apt-get >/dev/null || fail "apt-get was not found: install munge, slurmctld, slurmd and sbatch with the packages of this system"
[[ $EUID -eq 0 ]] || fail "packages are installed as root: run it with sudo"

# The packages start their daemons unless this file says no. What was there before comes back however the script ends.
policy=/usr/sbin/policy-rc.d
saved=
if [[ -e $policy || -L $policy ]]; then
    saved=$(mktemp "$policy.XXXXXX")
    cp --archive --remove-destination "$policy" "$saved"
fi
restore() { if [[ -n $saved ]]; then mv --force "$saved" "$policy"; else rm --force "$policy"; fi; }
trap restore EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
rm --force "$policy"
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod 755 "$policy"

export DEBIAN_FRONTEND=noninteractive
wait_for_lock=(-o DPkg::Lock::Timeout=300)
apt-get "${wait_for_lock[@]}" update -qq
apt-get "${wait_for_lock[@]}" install --yes -qq --no-install-recommends munge slurmctld slurmd slurm-client >/dev/null
echo "install.sh: installed $(slurmd -V)"
