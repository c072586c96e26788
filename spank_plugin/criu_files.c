// SPDX-License-Identifier: Apache-2.0
// criu_files.so: a plugin with which CRIU opens the job's files as the job's user.
//
// CRIU runs with the real ids of the user and effective root, and by these opens every file anew at a restore, and looks at its
// path at a dump. A file system that squashes root, as NFS does as a rule, takes that for nobody. What a file system is told is
// the fsuid (credentials(7)): here it becomes the user's, and the capabilities that the kernel takes away with it, such as
// CAP_DAC_OVERRIDE, are taken back, so that on other file systems nothing changes. exec(2) would undo it, so it is done in CRIU,
// at its start, and once more when the first task of a restore has made itself root (criu/namespaces.c, prepare_userns_creds).
#define _GNU_SOURCE
#include <grp.h>
#include <linux/capability.h>
#include <stddef.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "criu_plugin.h"

#define MOST 1024 // capsule.h, MAX_GROUPS

static uid_t user;
static gid_t group, groups[MOST];
static int count;

static int be_user(void)
{
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3];

	if (syscall(SYS_capget, &head, sets) < 0)
		return -1;
	setfsgid(group);
	setfsuid(user);
	for (size_t i = 0; i < _LINUX_CAPABILITY_U32S_3; i++)
		sets[i].effective = sets[i].permitted;
	return syscall(SYS_capset, &head, sets) < 0 ? -1 : 0;
}

static int set_groups(size_t n, const gid_t *list)
{
	if (n || getuid() != 0)
		return setgroups(n, list);
	return setgroups((size_t)count, groups) < 0 ? -1 : be_user();
}

static int begin(int stage)
{
	void **slot;
	(void)stage;

	user = getuid();
	group = getgid();
	count = getgroups(MOST, groups);
	if (user == 0 || count < 0)
		return 0;
	slot = criu_slot("setgroups");
	if (slot)
		*slot = (void *)set_groups;
	return be_user();
}

struct plugin CR_PLUGIN_DESC = { .name = "gpucr_files", .init = begin, .version = 2 << 8 };
