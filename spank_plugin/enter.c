/* SPDX-License-Identifier: Apache-2.0 */
/* `gpucr-init enter`: run a program inside a capsule's PID, mount and network namespaces. CRIU must stay outside its IPC
 * and UTS namespaces, so that it dumps them. --plain keeps root's identity, for tools such as tar. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capsule.h"
#include "util.h"

static pid_t child;

static void pass_on(int s)
{
	if (child > 0)
		kill(child, s);
}

static int join(long long init_pid)
{
	static const char *const names[] = { "pid", "net", "mnt" }; /* mnt last: /proc is ours until then */
	int fds[3];

	for (int i = 0; i < 3; i++) {
		char path[64];

		snprintf(path, sizeof(path), "/proc/%lld/ns/%s", init_pid, names[i]);
		fds[i] = open(path, O_RDONLY | O_CLOEXEC);
		if (fds[i] < 0) {
			say("enter: %s: %s", path, strerror(errno));
			return -1;
		}
	}
	for (int i = 0; i < 3; i++) {
		if (setns(fds[i], 0) < 0) {
			say("enter: join %s namespace: %s", names[i], strerror(errno));
			return -1;
		}
		close(fds[i]);
	}
	return chdir("/");
}

int enter_main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "init-pid", 1, NULL, 'i' }, { "uid", 1, NULL, 'u' },	 { "gid", 1, NULL, 'g' },  { "groups", 1, NULL, 'G' },
		{ "plain", 0, NULL, 'p' },    { NULL, 0, NULL, 0 },
	};
	static struct capsule_args who; /* the groups alone */
	long long init_pid = -1, uid = -1, gid = -1;
	bool plain = false, ok = true;
	int c, status;

	while ((c = getopt_long(argc, argv, "+", options, NULL)) != -1)
		switch (c) {
		case 'i': ok &= parse_number(optarg, 1, INT_MAX, &init_pid); break;
		case 'u': ok &= parse_number(optarg, 0, UINT_MAX - 1, &uid); break;
		case 'g': ok &= parse_number(optarg, 0, UINT_MAX - 1, &gid); break;
		case 'G': ok &= parse_groups(&who, optarg); break;
		case 'p': plain = true; break;
		default: ok = false;
		}
	if (!ok || init_pid < 0 || !argv[optind] || (!plain && (uid < 0 || gid < 0))) {
		say("usage: gpucr-init enter --init-pid N (--plain | --uid U --gid G [--groups A,B]) -- COMMAND...");
		return 125;
	}
	if (!who.ngroups) /* never those of the agent */
		who.groups[who.ngroups++] = (gid_t)gid;
	if (join(init_pid) < 0)
		return 125;
	signal(SIGTERM, pass_on);
	signal(SIGINT, pass_on);
	child = fork();
	if (child < 0) {
		say("enter: fork: %s", strerror(errno));
		return 125;
	}
	if (child == 0) {
		signal(SIGTERM, SIG_DFL);
		signal(SIGINT, SIG_DFL);
		if (!plain && become_criu((uid_t)uid, (gid_t)gid, who.groups, who.ngroups) < 0) {
			say("enter: take CRIU's identity: %s", strerror(errno));
			_exit(125);
		}
		execvp(argv[optind], argv + optind);
		say("enter: %s: %s", argv[optind], strerror(errno));
		_exit(errno == ENOENT ? 127 : 126);
	}
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return 125;
	return shell_status(status);
}
