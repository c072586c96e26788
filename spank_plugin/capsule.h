/* SPDX-License-Identifier: Apache-2.0 */
/* gpucr-init: what its roles share. */
#ifndef GPUCR_CAPSULE_H
#define GPUCR_CAPSULE_H

#include <stdbool.h>
#include <sys/types.h>

#define MAX_GROUPS 1024
#define MAX_PRIVATE 16
#define MAX_BINDS 16
#define MAX_COVERS 4
#define DIED_WITH_CAPSULE 1

struct capsule_args {
	bool restore;
	uid_t uid;
	gid_t gid;
	gid_t groups[MAX_GROUPS];
	size_t ngroups;
	const char *hostname, *run_dir, *hosts; /* hosts: NULL without */
	int netns, control;                     /* -1 without */
	long long last_pid, holder_pid; /* of a restore; holder_pid 0: the one after last_pid */
	const char *private[MAX_PRIVATE];
	int nprivate;
	struct {
		const char *from, *to;
	} bind[MAX_BINDS];
	int nbind;
	const char *cover[MAX_COVERS]; /* directories under a tmpfs in which targets of binds are made */
	int ncover;
	long long tmpfs_size; /* bytes, 0: the kernel's default of half the memory */
	bool cgroup_wait;
	bool hide_io_uring; /* of a start: a capsule that is restored has it in its processes */
	int sync; /* pipe from holder and shepherd to init while they start */
};

/* capsule_args.c */
bool parse_groups(struct capsule_args *a, const char *text); /* A,B,... behind those that are there */
int capsule_parse(struct capsule_args *a, int argc, char **argv);

/* The roles; each is a main() that gets the arguments after the role's name. */
int capsule_main(const struct capsule_args *a, char **argv); /* argv: passed on to the holder */
int holder_main(const struct capsule_args *a);
int shepherd_main(const struct capsule_args *a);
int enter_main(int argc, char **argv);
int hook_main(void);
int run_main(int argc, char **argv);

/* mounts.c: 0, or -1 with errno and *step naming what failed. */
int capsule_mounts(const struct capsule_args *a, const char **step);

/* identity.c */
/* Become the user for good: groups, gids, uids, no capabilities, and dumpable again, since CRIU and the user's own
 * tools must be able to look at the process. */
int become_user(uid_t uid, gid_t gid, const gid_t *groups, size_t ngroups);
/* Real ids of the user, effective root: what CRIU runs as. Some hosts withhold CAP_SYS_RESOURCE from root, and then
 * prlimit(2) on another user's process fails unless the real ids match. The groups are for the files (criu_files.c). */
int become_criu(uid_t uid, gid_t gid, const gid_t *groups, size_t ngroups);
void set_name(const char *comm);

/* hide.c: io_uring_setup(2) answers ENOSYS in this process and all that it starts. 0, or -1 with errno. Needs CAP_SYS_ADMIN,
 * since without "no new privileges" programs keep what their set-user-id bit gives them. */
int hide_io_uring(void);

/* holder_restore.c: run CRIU and take the restored tree over. 0, or -1 after telling the agent. */
int holder_restore(const struct capsule_args *a, pid_t *shepherd);

/* Tell init over the sync pipe. */
void sync_ready(int fd, pid_t shepherd);
void sync_failed(int fd, const char *step, int err);

#endif
