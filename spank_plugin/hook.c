/* SPDX-License-Identifier: Apache-2.0 */
/* gpucr-hook: CRIU's --action-script. Asks the agent at every point and waits as long as it takes: the agent decides
 * which of them matter. Without an answer CRIU must undo the dump, so every failure is exit status 1. But a job whose
 * checkpoint is committed and which is being requeued may not run on here: an agent that dies then has left a file
 * `leaving` beside its socket, and the tree stays frozen until the next agent ends it or removes the file. */
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "capsule.h"
#include "util.h"
#include "wire.h"

static void wait_while_leaving(const char *socket_path)
{
	const char *slash = strrchr(socket_path, '/');
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%.*sleaving", slash ? (int)(slash - socket_path) + 1 : 0, socket_path);
	while (access(path, F_OK) == 0)
		usleep(50000);
}

int hook_main(void)
{
	const char *action = getenv("CRTOOLS_SCRIPT_ACTION"), *pid = getenv("CRTOOLS_INIT_PID");
	const char *path = getenv("GPUCR_HOOK_SOCKET");
	int fd = path && action ? wire_connect(path) : -1;
	struct frame f;
	struct msg m;
	struct rx rx;

	if (fd < 0) {
		say("hook: agent not reachable");
		return 1;
	}
	msg_init(&m, GC_HOOK);
	msg_str(&m, "ACTION", action);
	msg_str(&m, "PID", pid && *pid ? pid : "0"); /* not there in pre-stream and pre-restore */
	if (msg_send(&m, fd, NULL, 0) < 0)
		return 1;
	rx_init(&rx, fd);
	if (rx_wait(&rx, &f, -1) != 1 || f.type != GC_HOOKRESULT) {
		wait_while_leaving(path);
		return 1;
	}
	return (int)frame_int(&f, "STATUS", 1) & 0xff;
}
