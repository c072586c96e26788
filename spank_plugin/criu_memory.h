// SPDX-License-Identifier: Apache-2.0
// What criu_memory.so has to do with: the kernel's question for pages, its own packets.
#ifndef GPUCR_CRIU_MEMORY_H
#define GPUCR_CRIU_MEMORY_H

#include <stdint.h>
#include <sys/ioctl.h>

// linux/fs.h of Linux 6.7 and later.
struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
struct region {
	uint64_t start, end, categories;
};
#define SCAN _IOWR('f', 16, struct scan)

#define MOST 2048

struct packet {
	uint32_t pid, count; // pid 0, once: the plugin is in place
	uint64_t ranges[MOST][2];
};

#endif
