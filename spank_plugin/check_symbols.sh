#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The plugin exports what Slurm looks for and nothing else; what it needs from outside is libc and SPANK.
set -eu
export LC_ALL=C
got=$(nm -D --defined-only "$1" | awk '{print $3}' | sort | tr '\n' ' ')
want="plugin_name plugin_type plugin_version slurm_spank_init slurm_spank_init_post_opt slurm_spank_task_init spank_plugin_version "
if [ "$got" != "$want" ]; then
	echo "exported: $got" >&2
	echo "expected: $want" >&2
	exit 1
fi
if nm -D --undefined-only "$1" | awk '{print $2}' | grep -E '^(fork|vfork|clone|unshare|setns|exec.*|system|popen|socket|connect)(@|$)'; then
	echo "the plugin must not call these" >&2
	exit 1
fi
echo "symbols: ok"
