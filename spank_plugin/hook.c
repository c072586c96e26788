/* SPDX-License-Identifier: Apache-2.0 */
/* gpucr-hook: CRIU's --action-script. Asks the agent at every point and waits as long as it takes: the agent decides
 * which of them matter. Without an answer CRIU must undo the dump, so every failure is exit status 1. */
#include <stdlib.h>

#include "capsule.h"
#include "util.h"
#include "wire.h"

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
	if (rx_wait(&rx, &f, -1) != 1 || f.type != GC_HOOKRESULT)
		return 1;
	return (int)frame_int(&f, "STATUS", 1) & 0xff;
}
