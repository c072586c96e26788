/* SPDX-License-Identifier: Apache-2.0 */
/* gpucr-init is one static program with several roles, so that nothing of the host's libraries is needed or mapped inside
 * a capsule. */
#include <string.h>

#include "capsule.h"
#include "util.h"

int main(int argc, char **argv)
{
	static struct capsule_args args;
	const char *slash = strrchr(argv[0] ? argv[0] : "", '/'), *name = slash ? slash + 1 : argv[0];
	const char *role = argc > 1 ? argv[1] : "";

	if ((name && !strcmp(name, "gpucr-hook")) || !strcmp(role, "hook"))
		return hook_main();
	if (!strcmp(role, "enter"))
		return enter_main(argc - 1, argv + 1);
	if (!strcmp(role, "run"))
		return run_main(argc - 1, argv + 1);
	if (!strcmp(role, "capsule"))
		return capsule_parse(&args, argc - 1, argv + 1) < 0 ? 2 : capsule_main(&args, argv + 2);
	if (!strcmp(role, "holder"))
		return capsule_parse(&args, argc - 1, argv + 1) < 0 || args.sync < 0 ? 2 : holder_main(&args);
	say("usage: gpucr-init capsule|enter|hook|run ...");
	return 2;
}
