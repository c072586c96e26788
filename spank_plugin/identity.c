/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <grp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "capsule.h"

int become_user(uid_t uid, gid_t gid, const gid_t *groups, size_t ngroups)
{
	/* Groups before gid before uid; leaving uid 0 in all three clears every capability. */
	if (setgroups(ngroups, groups) < 0 || setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0)
		return -1;
	return prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
}

int become_criu(uid_t uid, gid_t gid, const gid_t *groups, size_t ngroups)
{
	if (setgroups(ngroups, groups) < 0 || setresgid(gid, 0, 0) < 0)
		return -1;
	return setresuid(uid, 0, 0);
}

void set_name(const char *comm)
{
	prctl(PR_SET_NAME, comm, 0, 0, 0);
}
