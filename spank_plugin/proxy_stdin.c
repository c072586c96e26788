/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proxy.h"
#include "util.h"

/* The ring holds ready pieces (header and bytes), the same for every task. When the slowest task is a whole ring behind,
 * nothing more is read. */
#define RING 65536
#define PIECE 16384

static unsigned char ring[RING];
static uint64_t head;       /* bytes put in since the start */
static int source = -1;     /* -1: none, or at its end */
static bool ended;          /* the piece of length 0 is in the ring */
static long long only = -1; /* the one rank that takes input; -1: all */
static bool nobody = true;

void stdin_plan(const char *what)
{
	nobody = !what || !*what || !strcmp(what, "none");
	only = -1;
	if (nobody)
		return;
	source = 0;
	if (!strncmp(what, "file:", 5)) {
		source = open(what + 5, O_RDONLY | O_CLOEXEC);
		if (source < 0) {
			complain("Could not open stdin file %s: %s", what + 5, strerror(errno));
			exit(1);
		}
	} else if (strcmp(what, "all") && !parse_number(what, 0, 1LL << 31, &only)) {
		nobody = true;
		source = -1;
	}
}

bool stdin_takes(long long rank)
{
	return !nobody && (only < 0 || only == rank);
}

uint64_t stdin_join(void)
{
	return ended ? head - STDIO_HEADER : head; /* a late one still learns of the end */
}

static void append(const unsigned char *data, size_t len)
{
	size_t at = head % RING, first = len < RING - at ? len : RING - at;

	memcpy(ring + at, data, first);
	memcpy(ring, data + first, len - first);
	head += len;
}

static size_t space(uint64_t slowest)
{
	return RING - (size_t)(head - slowest);
}

struct pollfd stdin_poll(bool ready, size_t readers, uint64_t slowest)
{
	struct pollfd p = { .fd = -1, .events = POLLIN };

	if (ready && readers && source >= 0 && !ended && space(slowest) > STDIO_HEADER)
		p.fd = source;
	return p;
}

static void piece(const unsigned char *data, size_t len)
{
	unsigned char h[STDIO_HEADER] = { 0, len & 0xff, len >> 8 & 0xff, len >> 16 & 0xff, 0 };

	append(h, sizeof(h));
	append(data, len);
}

void stdin_step(uint64_t slowest)
{
	unsigned char data[PIECE];
	size_t room = space(slowest) - STDIO_HEADER;
	ssize_t n = read(source, data, room < PIECE ? room : PIECE);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	piece(data, n > 0 ? (size_t)n : 0);
	if (n > 0)
		return;
	ended = true;
	if (source > 0)
		close(source);
	source = -1;
}

size_t stdin_at(uint64_t place, const unsigned char **data)
{
	size_t at = place % RING, n = (size_t)(head - place);

	*data = ring + at;
	return n < RING - at ? n : RING - at;
}
