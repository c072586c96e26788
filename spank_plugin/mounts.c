/* SPDX-License-Identifier: Apache-2.0 */
/* The capsule's view of the file system. Everything the job opens is opened below these mounts: descriptors from
 * another mount namespace cannot be dumped. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "capsule.h"

/* By number: these calls are younger than some C libraries that we are built with. */
static int open_tree_clone(const char *path)
{
	return (int)syscall(SYS_open_tree, AT_FDCWD, path, 1 /* CLONE */ | O_CLOEXEC | AT_RECURSIVE);
}

static int move_mount_to(int fd, const char *path)
{
	return (int)syscall(SYS_move_mount, fd, "", AT_FDCWD, path, 4 /* MOVE_MOUNT_F_EMPTY_PATH */);
}

/* A sysfs of the job's own network namespace: UCX looks for interfaces in /sys/class/net. The cgroup file systems are
 * mounted below /sys and must stay in sight. */
static int own_sysfs(void)
{
	struct stat st;
	int cgroup = -1, r;

	if (stat("/sys/fs/cgroup", &st) == 0) {
		cgroup = open_tree_clone("/sys/fs/cgroup");
		if (cgroup < 0)
			return -1;
	}
	r = mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	if (r == 0 && cgroup >= 0)
		r = move_mount_to(cgroup, "/sys/fs/cgroup");
	if (cgroup >= 0)
		close(cgroup);
	return r;
}

static int private_tmpfs(const struct capsule_args *a, const char *path)
{
	char data[64];

	if (a->tmpfs_size > 0)
		snprintf(data, sizeof(data), "mode=1777,size=%lld", a->tmpfs_size);
	else
		snprintf(data, sizeof(data), "mode=1777");
	return mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, data);
}

int capsule_mounts(const struct capsule_args *a, const char **step)
{
	/* Slave, not private: what the host unmounts must go here too, or a capsule keeps the network namespaces of
	 * jobs that have left (their files in /run/netns), with their devices, alive; and file systems that the host
	 * mounts later are seen. Nothing goes the other way. */
	*step = "make mounts slaves of the host's";
	if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
		return -1;
	*step = "mount /proc";
	if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
		return -1;
	*step = "mount /sys";
	if (a->netns >= 0 && own_sysfs() < 0)
		return -1;
	*step = "bind the hosts file"; /* before the private directories, one of which may cover it */
	if (a->hosts && mount(a->hosts, "/etc/hosts", NULL, MS_BIND, NULL) < 0)
		return -1;
	for (int i = 0; i < a->nbind; i++) { /* mount(2) follows links in both */
		*step = a->bind[i].to;
		if (mount(a->bind[i].from, a->bind[i].to, NULL, MS_BIND, NULL) < 0)
			return -1;
	}
	for (int i = 0; i < a->nprivate; i++) {
		*step = a->private[i];
		if (private_tmpfs(a, a->private[i]) < 0)
			return -1;
	}
	return 0;
}
