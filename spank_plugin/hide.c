/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A kernel without io_uring, for one capsule. CRIU saves no ring; programs and libraries that find no io_uring use threads or
 * epoll instead (libuv, liburing's callers, MariaDB), since kernels, sites and containers switch it off. CRIU saves and
 * restores the filter with each process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "capsule.h"

enum { IO_URING_SETUP = 425 }; /* in every architecture's table */

int hide_io_uring(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, IO_URING_SETUP, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(filter) / sizeof(*filter), .filter = filter };

	/* It guards nothing, so it needs no protection against speculation, which older kernels give at a cost. */
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program);
}
