/* SPDX-License-Identifier: Apache-2.0 */
/* The capsule's view of the file system. Everything the job opens is opened below these mounts: descriptors from
 * another mount namespace cannot be dumped. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
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
	return (int)syscall(SYS_move_mount, fd, "", AT_FDCWD, path, 0x14 /* F_EMPTY_PATH, T_SYMLINKS */);
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

/* Terminals of the job's own: a restore needs the numbers that they had, which on the node others may have. */
static int own_terminals(void)
{
	static const char options[] = "newinstance,ptmxmode=0666,mode=0620,gid=5"; /* tty, in every distribution */
	struct stat st;

	if (mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options) < 0)
		return errno == ENOENT ? 0 : -1; /* a node without terminals */
	if (lstat("/dev/ptmx", &st) == 0 && !S_ISLNK(st.st_mode))
		return mount("/dev/pts/ptmx", "/dev/ptmx", NULL, MS_BIND, NULL);
	return 0;
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

/* A target below a cover is made, with the directories above it: a directory for a directory, a file for anything else. */
static int make_target(const struct capsule_args *a, const char *path, int from)
{
	size_t n = 0;
	struct stat st;
	char part[PATH_MAX];
	int fd;

	for (int i = 0; i < a->ncover && !n; i++)
		if (!strncmp(path, a->cover[i], strlen(a->cover[i])) && path[strlen(a->cover[i])] == '/')
			n = strlen(a->cover[i]);
	if (!n)
		return 0;
	if (strlen(path) >= sizeof(part)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	for (n += 1; path[n]; n++) {
		if (path[n] != '/')
			continue;
		memcpy(part, path, n);
		part[n] = '\0';
		if (mkdir(part, 0755) < 0 && errno != EEXIST)
			return -1;
	}
	if (fstat(from, &st) < 0)
		return -1;
	if (S_ISDIR(st.st_mode))
		return mkdir(path, 0755) < 0 && errno != EEXIST ? -1 : 0;
	fd = open(path, O_CREAT | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0644);
	return fd < 0 ? -1 : close(fd);
}

/* Sources are opened first: a cover may hide them. Links are followed in both. */
static int bind_all(const struct capsule_args *a, const char **step)
{
	int from[MAX_BINDS];

	for (int i = 0; i < a->nbind; i++) {
		*step = a->bind[i].from;
		from[i] = open_tree_clone(a->bind[i].from);
		if (from[i] < 0)
			return -1;
	}
	for (int i = 0; i < a->ncover; i++) {
		*step = a->cover[i];
		if (mount("tmpfs", a->cover[i], "tmpfs", MS_NOSUID | MS_NODEV, "mode=755") < 0)
			return -1;
	}
	for (int i = 0; i < a->nbind; i++) {
		*step = a->bind[i].to;
		if (make_target(a, a->bind[i].to, from[i]) < 0 || move_mount_to(from[i], a->bind[i].to) < 0)
			return -1;
		close(from[i]);
	}
	return 0;
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
	*step = "mount /dev/pts";
	if (own_terminals() < 0)
		return -1;
	*step = "bind the hosts file"; /* before the private directories, one of which may cover it */
	if (a->hosts && mount(a->hosts, "/etc/hosts", NULL, MS_BIND, NULL) < 0)
		return -1;
	if (bind_all(a, step) < 0)
		return -1;
	for (int i = 0; i < a->nprivate; i++) {
		*step = a->private[i];
		if (private_tmpfs(a, a->private[i]) < 0)
			return -1;
	}
	return 0;
}
