// SPDX-License-Identifier: Apache-2.0
// criu_memory.so in a program that asks for pages as CRIU does: of this process, whose memory does not change meanwhile.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "criu_memory.h"
#include "criu_plugin.h"
#include "test_check.h"

#define MIB (1 << 20)
#define PAGE 4096

static int pagemap, listener, peer;
static struct region regions[64];
static struct packet packet;

// As CRIU's pagemap-cache.c asks: what is in memory or in swap, but not zero or of a file.
static int ask(char *start, size_t size, uint64_t room)
{
	struct scan scan = {
		.size = sizeof(scan), .start = (uintptr_t)start, .end = (uintptr_t)start + size, .vec = (uintptr_t)regions, .vec_len = room,
		.category_inverted = 1 << 5 | 1 << 2, .category_mask = 1 << 5 | 1 << 2, .category_anyof_mask = 1 << 3 | 1 << 4,
		.return_mask = 1 << 3 | 1 << 4,
	};
	int found = ioctl(pagemap, SCAN, &scan);

	CHECK(found < 0 || scan.walk_end == scan.end || (uint64_t)found == room);
	return found;
}

// The next packet and its descriptor: 1, or 0 when there is none.
static int hear(int *fd)
{
	char control[CMSG_SPACE(sizeof(int))];
	struct iovec part = { &packet, sizeof(packet) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };

	*fd = -1;
	if (recvmsg(peer, &message, MSG_DONTWAIT) <= 0)
		return 0;
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	if (head)
		memcpy(fd, CMSG_DATA(head), sizeof(int));
	return 1;
}

static char *map(size_t size, int flags)
{
	// A page that may not be touched on both sides, so that it is a mapping of its own.
	char *all = mmap(NULL, size + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *memory = mmap(all + PAGE, size, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	CHECK(memory == all + PAGE);
	madvise(memory, size, MADV_NOHUGEPAGE);
	return memory;
}

int main(int argc, char **argv)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	int memory;

	snprintf(name.sun_path, sizeof(name.sun_path), "%s.sock", argv[0]);
	unlink(name.sun_path);
	listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	CHECK(bind(listener, (struct sockaddr *)&name, sizeof(name)) == 0 && listen(listener, 1) == 0);
	setenv("GPUCR_MEMORY_SOCKET", name.sun_path, 1);
	char path[64];
	snprintf(path, sizeof(path), "/proc/%d/pagemap", getpid());
	pagemap = open(path, O_RDONLY);

	char *large = map(8 * MIB, MAP_PRIVATE), *small = map(2 * MIB, MAP_PRIVATE), *shared = map(8 * MIB, MAP_SHARED);
	char *constant = map(8 * MIB, MAP_PRIVATE);
	memset(small, 1, 2 * MIB);
	memset(shared, 1, 8 * MIB);
	memset(constant, 1, 8 * MIB);
	mprotect(constant, 8 * MIB, PROT_READ);
	for (int page = 0; page < 200; page += 2)
		large[page * PAGE] = (char)(page + 1);
	large[8 * MIB - 1] = 7;
	if (ask(large, 8 * MIB, 64) < 0 && errno == ENOTTY) {
		puts("test_memory: skipped, this kernel has no PAGEMAP_SCAN");
		return 0;
	}
	CHECK(ask(large, 8 * MIB, 64) == 64);

	void *library = dlopen(argc > 1 ? argv[1] : "build/criu_memory.so", RTLD_LAZY);
	CHECK(library != NULL);
	struct plugin *plugin = dlsym(library, "CR_PLUGIN_DESC");
	CHECK(plugin != NULL && plugin->max_hooks == 0);
	CHECK(plugin->init(2) == 0); // a restore
	CHECK(ask(large, 8 * MIB, 64) == 64);
	CHECK(plugin->init(0) == 0);
	peer = accept(listener, NULL, NULL);
	CHECK(hear(&memory) && packet.pid == 0 && packet.count == 0 && memory == -1);

	// Memory that cannot be opened is CRIU's. The mappings are known, so that only this open is refused.
	struct rlimit limit, none = { 0 };
	CHECK(ask(large, 4 * MIB, 64) == 64);
	CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	none.rlim_max = limit.rlim_max;
	CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0 && ask(large, 8 * MIB, 64) == 64);
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0 && !hear(&memory));

	// All pages in their order, though they do not fit into what was asked with.
	CHECK(ask(large, 8 * MIB, 64) == 0);
	CHECK(hear(&memory) && packet.pid == (uint32_t)getpid() && packet.count == 101 && memory >= 0);
	for (int i = 0; i < 100; i++) {
		char byte = 0;
		CHECK(packet.ranges[i][0] == (uintptr_t)large + 2 * i * PAGE && packet.ranges[i][1] == packet.ranges[i][0] + PAGE);
		CHECK(pread(memory, &byte, 1, (off_t)packet.ranges[i][0]) == 1 && byte == (char)(2 * i + 1));
	}
	CHECK(packet.ranges[100][1] == (uintptr_t)large + 8 * MIB);
	CHECK(write(memory, "x", 1) < 0 && errno == EBADF);
	close(memory);
	// The rest of it, as CRIU asks on; the descriptor is there already.
	CHECK(ask(large + 4 * MIB, 4 * MIB, 64) == 0);
	CHECK(hear(&memory) && packet.count == 1 && memory == -1);

	// What is small, shared, may not be written, or is only a beginning or more than a mapping, is CRIU's.
	CHECK(ask(small, 2 * MIB, 64) == 1 && regions[0].start == (uintptr_t)small);
	CHECK(ask(constant, 8 * MIB, 64) == 1);
	CHECK(ask(shared, 8 * MIB, 64) >= 0);
	CHECK(ask(large, 4 * MIB, 64) == 64);
	CHECK(ask(large, 8 * MIB + PAGE, 64) == 64);
	CHECK(!hear(&memory));

	// Nobody hears it any more: CRIU fails.
	close(peer);
	CHECK(ask(large, 8 * MIB, 64) == -1 && errno == EPIPE);
	plugin->exit(0, -1);
	unlink(name.sun_path);
	puts("test_memory: ok");
	return 0;
}
