// SPDX-License-Identifier: Apache-2.0
// criu_memory.so with memory of random layouts, in a program that asks for pages in the windows in which CRIU does
// (criu/pagemap-cache.c, criu/mem.c): what CRIU finds and what the plugin names are all pages, each of them once.
// Arguments: the plugin, number of layouts, first of them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "criu_memory.h"
#include "criu_plugin.h"
#include "test_check.h"

#define PAGE UINT64_C(4096)
#define WINDOW (UINT64_C(2) << 20)
#define PAGES (UINT64_C(64) << 8)
#define IS_GUARD (UINT64_C(1) << 8)
#define MOST_REGIONS 32768

static char *arena;
static int pagemap, peer;
static uint64_t guard = IS_GUARD;
static uint8_t by_criu[PAGES], by_plugin[PAGES];
static struct region regions[MOST_REGIONS];
static struct area {
	uint64_t start, end;
	int shared;
} areas[PAGES];
static size_t area_count;
// CRIU's cache: the window, how many regions it has, which is next, room for them.
static struct {
	uint64_t start, end;
	long count, next, room;
} cache;

static uint64_t below(uint64_t end)
{
	return (uint64_t)random() % end;
}

static struct scan question(uint64_t start, uint64_t end, uint64_t room)
{
	return (struct scan){
		.size = sizeof(struct scan), .start = start, .end = end, .vec = (uintptr_t)regions, .vec_len = room,
		.category_inverted = 1 << 5 | 1 << 2, .category_mask = 1 << 5 | 1 << 2, .category_anyof_mask = 1 << 3 | 1 << 4,
		.return_mask = 1 << 3 | 1 << 4 | 1 << 7 | guard,
	};
}

static void mark(uint8_t *pages, uint64_t start, uint64_t end)
{
	for (uint64_t at = start; at < end; at += PAGE) {
		uint64_t page = (at - (uintptr_t)arena) / PAGE;
		CHECK(page < PAGES && pages[page] < 255);
		pages[page]++;
	}
}

static void hear(void)
{
	static struct packet packet;

	while (recv(peer, &packet, sizeof(packet), MSG_DONTWAIT) > 0)
		for (uint32_t i = 0; i < packet.count; i++)
			mark(by_plugin, packet.ranges[i][0], packet.ranges[i][1]);
}

static void fill(uint64_t start, uint64_t end)
{
	struct scan scan = question(start, end, cache.room);

	cache.start = start;
	cache.count = ioctl(pagemap, SCAN, &scan);
	cache.next = 0;
	cache.end = scan.walk_end;
	CHECK(cache.count >= 0);
	hear();
}

// A small mapping is asked for with those behind it that are in the same 2 MiB, to their end.
static void fill_for(size_t number)
{
	uint64_t start = areas[number].start, end = areas[number].end, low = start & ~(WINDOW - 1), high = low + WINDOW;
	size_t next = number + 1;

	if (end - start < WINDOW && start - low < WINDOW / 4) {
		while (next < area_count && areas[next].start <= high && areas[next].end <= high)
			next++;
		if (next > number + 1)
			end = high;
	}
	fill(start, end);
}

static void dump_as_criu(void)
{
	for (size_t i = 0; i < area_count; i++) {
		uint64_t at = areas[i].start, end = areas[i].end;

		if (cache.start > at || cache.end < end)
			fill_for(i);
		while (at < end && !areas[i].shared) {
			if (at >= cache.end)
				fill(at, end);
			while (cache.next < cache.count && regions[cache.next].end <= at)
				cache.next++;
			if (cache.next == cache.count) {
				at = cache.end;
			} else if (at < regions[cache.next].start) {
				at = regions[cache.next].start;
			} else {
				if (!(regions[cache.next].categories & IS_GUARD))
					mark(by_criu, at, at + PAGE);
				at += PAGE;
			}
		}
	}
}

static void touch(char *memory, uint64_t pages)
{
	uint64_t step = 1 + below(4), from = below(pages), kind = below(5);

	if (kind == 0)
		return;
	for (uint64_t page = 0; page < pages; page += step)
		if (kind != 1 || below(2))
			memory[page * PAGE] = 1;
	if (kind == 2)
		madvise(memory + from * PAGE, (pages - from) * PAGE, MADV_DONTNEED);
	if (kind == 3)
		madvise(memory + from * PAGE, (1 + below(pages - from)) * PAGE, 102); // MADV_GUARD_INSTALL
	for (int i = 0; i < 20; i++) { // pages of zeros
		volatile char *byte = memory + below(pages) * PAGE;
		if (kind == 4)
			(void)*byte;
	}
}

// Mappings of all sizes, with and without gaps; some are in two by what they have been told, some in huge pages.
static void lay_out(int seed)
{
	static const int modes[] = { PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE };

	arena = seed % 2 ? sbrk((intptr_t)(PAGES * PAGE + PAGE)) : // the heap
			   mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(arena != (void *)-1);
	arena += -(uintptr_t)arena % PAGE;
	for (uint64_t page = 0; page < PAGES;) {
		static const uint64_t sizes[] = { 3, 40, 500, 1030, 3000 };
		uint64_t kind = below(6), pages = 1 + below(kind < 5 ? sizes[kind] : 1);
		char *memory = arena + page * PAGE;

		if (kind == 5)
			pages = below(2) ? 1024 : 1023; // 4 MiB, and less
		if (pages > PAGES - page)
			pages = PAGES - page;
		page += pages;
		if (below(8) == 0) {
			munmap(memory, pages * PAGE);
			continue;
		}
		if (below(12) == 0)
			CHECK(mmap(memory, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
		madvise(memory, pages * PAGE, below(3) ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
		touch(memory, pages);
		mprotect(memory, pages * PAGE, modes[below(5)]);
		if (below(3) == 0)
			madvise(memory, pages * PAGE, MADV_DONTFORK);
	}
	madvise(arena, PAGES * PAGE, MADV_NOHUGEPAGE); // what is there stays as it is
}

static void look_up(void)
{
	char line[512], mode[5];
	uint64_t first = (uintptr_t)arena, last = first + PAGES * PAGE;
	FILE *maps = fopen("/proc/self/maps", "re");

	CHECK(maps != NULL);
	while (fgets(line, sizeof(line), maps)) {
		struct area *area = &areas[area_count];
		CHECK(sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &area->start, &area->end, mode) == 3);
		if (area->end <= first || area->start >= last)
			continue;
		area->shared = mode[3] != 'p';
		area_count++;
	}
	fclose(maps);
}

// By the kernel's word on 64 pages at once.
static void check_all(int seed)
{
	static uint8_t there[PAGES];

	for (size_t i = 0; i < area_count; i++) {
		for (uint64_t at = areas[i].start, end = areas[i].end; at < end && !areas[i].shared; at += 64 * PAGE) {
			struct scan scan = question(at, at + 64 * PAGE < end ? at + 64 * PAGE : end, 64);
			long count = syscall(SYS_ioctl, pagemap, SCAN, &scan);
			CHECK(count >= 0);
			for (long n = 0; n < count; n++)
				if (!(regions[n].categories & IS_GUARD))
					mark(there, regions[n].start, regions[n].end);
		}
	}
	for (uint64_t page = 0; page < PAGES; page++) {
		if (there[page] == by_criu[page] + by_plugin[page])
			continue;
		fprintf(stderr, "layout %d: page %" PRIu64 " is there %d times, CRIU has it %d times, the plugin %d times\n", seed, page,
			there[page], by_criu[page], by_plugin[page]);
		exit(1);
	}
}

// Returns how many pages the plugin has named.
static uint64_t try(int seed, const char *file)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	uint64_t found = 0, longest = WINDOW / PAGE;
	int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	char path[64];

	srandom((unsigned)seed);
	lay_out(seed);
	snprintf(path, sizeof(path), "/proc/%d/pagemap", getpid());
	pagemap = open(path, O_RDONLY);
	look_up();
	struct scan scan = question((uintptr_t)arena, (uintptr_t)arena + PAGE, 1);
	if (syscall(SYS_ioctl, pagemap, SCAN, &scan) < 0)
		guard = 0; // an older kernel
	for (size_t i = 0; i < area_count; i++)
		if ((areas[i].end - areas[i].start) / PAGE > longest)
			longest = (areas[i].end - areas[i].start) / PAGE;
	cache.room = (long)(below(3) ? longest : 1 + below(700));

	snprintf(name.sun_path, sizeof(name.sun_path), "%s.%d", file, getpid());
	unlink(name.sun_path);
	CHECK(bind(listener, (struct sockaddr *)&name, sizeof(name)) == 0 && listen(listener, 1) == 0);
	setenv("GPUCR_MEMORY_SOCKET", name.sun_path, 1);
	void *library = dlopen(file, RTLD_LAZY);
	CHECK(library != NULL);
	struct plugin *plugin = dlsym(library, "CR_PLUGIN_DESC");
	CHECK(plugin != NULL && plugin->init(0) == 0);
	peer = accept(listener, NULL, NULL);
	unlink(name.sun_path);
	dump_as_criu();
	check_all(seed);
	for (uint64_t page = 0; page < PAGES; page++)
		found += by_plugin[page];
	return found;
}

int main(int argc, char **argv)
{
	int count = argc > 2 ? atoi(argv[2]) : 100, first = argc > 3 ? atoi(argv[3]) : 0, some = 0;
	struct scan scan = { .size = sizeof(scan), .return_mask = 1 << 3 };

	pagemap = open("/proc/self/pagemap", O_RDONLY);
	if (ioctl(pagemap, SCAN, &scan) < 0 && errno == ENOTTY) {
		puts("test_layouts: skipped, this kernel has no PAGEMAP_SCAN");
		return 0;
	}
	for (int seed = first; seed < first + count; seed++) {
		int status;
		pid_t child = fork(); // the plugin looks up a process once
		CHECK(child >= 0);
		if (child == 0)
			_exit(try(seed, argc > 1 ? argv[1] : "build/criu_memory.so") ? 0 : 3);
		CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
		CHECK(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 3);
		some += WEXITSTATUS(status) == 0;
	}
	CHECK(some > count / 2);
	puts("test_layouts: ok");
	return 0;
}
