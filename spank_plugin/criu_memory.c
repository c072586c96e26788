// SPDX-License-Identifier: Apache-2.0
// A CRIU plugin: large private anonymous memory does not go through CRIU, but is named to who reads it with many threads.
//
// CRIU asks the kernel which pages of a mapping there are (ioctl PAGEMAP_SCAN), lends each of them to a pipe and writes it
// into the image, with one thread. Here the question is answered "none" for large mappings, and the real answer is sent to
// the socket in $GPUCR_MEMORY_SOCKET (docs/protocol.md), with a descriptor of the process's memory. All this happens
// while the tree is frozen. Without the variable, or where CRIU does not ask in this way, CRIU does everything.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "criu_memory.h"
#include "criu_plugin.h"

#define IS_GUARD (UINT64_C(1) << 8) // a category of pages
#define LARGE_BYTES (UINT64_C(4) << 20)
enum { STAGE_DUMP = 0 };

static int peer = -1;
static struct packet packet;

static int say(int memory)
{
	struct iovec part = { &packet, offsetof(struct packet, ranges) + packet.count * sizeof(packet.ranges[0]) };
	union {
		char room[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = { 0 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

	if (memory >= 0) {
		message.msg_control = control.room;
		message.msg_controllen = sizeof(control.room);
		struct cmsghdr *head = CMSG_FIRSTHDR(&message);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(head), &memory, sizeof(int));
	}
	ssize_t sent;
	do
		sent = sendmsg(peer, &message, MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	packet.count = 0;
	return sent < 0 ? -1 : 0;
}

// The pid of a descriptor of /proc/PID/pagemap; 0 for anything else.
static uint32_t pid_of(int fd)
{
	char link[64], path[64], rest = 0;
	uint32_t pid;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t size = readlink(link, path, sizeof(path) - 1);
	if (size < 0)
		return 0;
	path[size] = 0;
	return sscanf(path, "/proc/%" SCNu32 "/pagema%c", &pid, &rest) == 2 && rest == 'p' ? pid : 0;
}

// The large private anonymous mappings of one process that are plainly readable and writable. The tree is frozen, so they
// are looked up once.
static struct {
	uint32_t pid;
	size_t count, room;
	uint64_t (*ranges)[2];
} large;

static int look_up(uint32_t pid)
{
	char path[32], line[512];

	large.pid = 0;
	large.count = 0;
	snprintf(path, sizeof(path), "/proc/%" PRIu32 "/maps", pid);
	FILE *maps = fopen(path, "re");
	if (!maps)
		return -1;
	while (fgets(line, sizeof(line), maps)) {
		uint64_t start, end;
		unsigned long inode;
		char mode[5], name[16] = "";

		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %*s %*s %lu %15s", &start, &end, mode, &inode, name) < 4)
			continue; // the rest of a long name
		if (end - start < LARGE_BYTES || strncmp(mode, "rw", 2) || mode[3] != 'p' || inode)
			continue;
		if (*name && strcmp(name, "[heap]") && strncmp(name, "[anon:", 6))
			continue;
		if (large.count == large.room) {
			size_t room = large.room ? 2 * large.room : 64;
			void *more = realloc(large.ranges, room * sizeof(*large.ranges));
			if (!more) {
				fclose(maps);
				return -1;
			}
			large.ranges = more;
			large.room = room;
		}
		large.ranges[large.count][0] = start;
		large.ranges[large.count++][1] = end;
	}
	fclose(maps);
	large.pid = pid;
	return 0;
}

// Whether what is asked for is one of them, or its last part.
static int is_large(uint32_t pid, uint64_t start, uint64_t end)
{
	if (pid != large.pid && look_up(pid))
		return 0;
	for (size_t i = 0; i < large.count; i++)
		if (large.ranges[i][0] <= start && large.ranges[i][1] == end)
			return 1;
	return 0;
}

static int hand_over(int fd, struct scan *asked, uint32_t pid)
{
	static uint32_t last_pid;
	struct scan scan = *asked;
	struct region *regions = (struct region *)(uintptr_t)asked->vec;
	int memory = -1, result = -1;

	if (pid != last_pid) {
		char path[32];
		snprintf(path, sizeof(path), "/proc/%" PRIu32 "/mem", pid);
		memory = open(path, O_RDONLY | O_CLOEXEC);
		if (memory < 0)
			return ioctl(fd, SCAN, asked); // CRIU has its own way to read it
	}
	packet.pid = pid;
	while (scan.start < scan.end) {
		int count = ioctl(fd, SCAN, &scan);
		if (count < 0)
			goto out;
		for (int i = 0; i < count; i++) {
			if (regions[i].categories & IS_GUARD)
				continue;
			packet.ranges[packet.count][0] = regions[i].start;
			packet.ranges[packet.count++][1] = regions[i].end;
			if (packet.count < MOST)
				continue;
			if (say(memory))
				goto out;
			if (memory >= 0)
				close(memory);
			memory = -1;
			last_pid = pid;
		}
		// walk_end is not always where the kernel stopped: of more than 512 ranges it may be the place of the last 512th
		// one (seen with Linux 6.18), and what lies behind has been told, too.
		scan.start = scan.walk_end;
		if (count && regions[count - 1].end > scan.start)
			scan.start = regions[count - 1].end;
	}
	if (packet.count) {
		if (say(memory))
			goto out;
		last_pid = pid;
	}
	asked->walk_end = asked->end;
	result = 0;
out:
	if (memory >= 0)
		close(memory);
	return result;
}

static int answer(int fd, unsigned long request, ...)
{
	va_list rest;
	va_start(rest, request);
	void *argument = va_arg(rest, void *);
	va_end(rest);

	struct scan *asked = argument;
	if ((uint32_t)request == (uint32_t)SCAN) {
		uint32_t pid = pid_of(fd);

		if (pid && is_large(pid, asked->start, asked->end))
			return hand_over(fd, asked, pid);
	}
	return ioctl(fd, request, argument);
}

// CRIU goes on by itself where something is missing: who listens has not heard that the plugin is in place.
static int begin(int stage)
{
	const char *path = getenv("GPUCR_MEMORY_SOCKET");
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	void **slot;

	if (stage != STAGE_DUMP || !path || strlen(path) >= sizeof(name.sun_path))
		return 0;
	slot = criu_slot("ioctl");
	if (!slot)
		return 0;
	strcpy(name.sun_path, path);
	peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (peer < 0 || connect(peer, (struct sockaddr *)&name, sizeof(name)) < 0)
		return 0;
	packet.pid = packet.count = 0;
	if (say(-1) == 0)
		*slot = answer;
	return 0;
}

static void end(int stage, int result)
{
	(void)stage, (void)result;
	if (peer >= 0)
		close(peer);
	peer = -1;
}

struct plugin CR_PLUGIN_DESC = { .name = "gpucr_memory", .init = begin, .exit = end, .version = 2 << 8 };
