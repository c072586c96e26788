/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <fcntl.h>
#include <unistd.h>

#include "test_check.h"
#include "util.h"
#include "wire.h"

static int ours, theirs;
static struct rx rx;

static void open_pair(void)
{
	int fds[2];

	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
	ours = fds[0];
	theirs = fds[1];
	rx_init(&rx, theirs);
}

static void close_pair(void)
{
	close(ours);
	rx_close(&rx);
}

static void round_trip(void)
{
	struct frame f;
	struct msg m;
	int fds[2] = { 0, 1 }, fd;
	size_t pos = 0;
	char **v;

	open_pair();
	msg_init(&m, GC_SPAWN);
	msg_str(&m, "TASK", "batch.0");
	msg_str(&m, "ARG", "sh");
	msg_str(&m, "ARG", "a=b");
	msg_str(&m, "ENV", "X=");
	msg_int(&m, "NICE", -3);
	CHECK(msg_send(&m, ours, fds, 2) == 0);
	msg_init(&m, GC_GO);
	CHECK(msg_send(&m, ours, NULL, 0) == 0);
	CHECK(rx_wait(&rx, &f, 1000) == 1);
	CHECK(f.type == GC_SPAWN && f.nfds == 2);
	CHECK_STR("batch.0", frame_get(&f, "TASK"));
	CHECK_STR(NULL, frame_get(&f, "TAS"));
	CHECK(frame_count(&f, "ARG") == 2 && frame_int(&f, "NICE", 0) == -3 && frame_int(&f, "TASK", 7) == 7);
	CHECK_STR("sh", frame_next(&f, "ARG", &pos));
	CHECK_STR("a=b", frame_next(&f, "ARG", &pos));
	CHECK(!frame_next(&f, "ARG", &pos));
	v = frame_vector(&f, "ENV");
	CHECK(v && !strcmp(v[0], "X=") && !v[1]);
	free(v);
	fd = frame_take_fd(&f, 0);
	CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
	close(fd);
	fd = f.fds[1];
	frame_clear(&f);
	CHECK(fcntl(fd, F_GETFD) < 0);
	CHECK(rx_wait(&rx, &f, 1000) == 1 && f.type == GC_GO && f.len == 0);
	frame_clear(&f);
	CHECK(rx_wait(&rx, &f, 0) == 0);
	close(ours);
	CHECK(rx_wait(&rx, &f, 1000) == -1 && errno == 0);
	close_pair();
}

static void in_pieces(void)
{
	const char bytes[] = "GC\1\0\14\0\0\0\7\0\0\0MSG=hi";
	struct frame f;

	open_pair();
	for (size_t i = 0; i < sizeof(bytes); i++) {
		CHECK(rx_read(&rx, &f) == 0);
		CHECK(write(ours, bytes + i, 1) == 1);
	}
	CHECK(rx_read(&rx, &f) == 1 && f.type == GC_PRINT);
	CHECK_STR("hi", frame_get(&f, "MSG"));
	frame_clear(&f);
	close_pair();
}

static void refused(const char *bytes, size_t n)
{
	struct frame f;

	open_pair();
	CHECK(write(ours, bytes, n) == (ssize_t)n);
	shutdown(ours, SHUT_WR);
	int r = rx_wait(&rx, &f, 1000);
	if (r != -1 || errno != EPROTO)
		fprintf(stderr, "%d %s after %02x %02x\n", r, strerror(errno), bytes[4], bytes[8]);
	CHECK(r == -1 && errno == EPROTO);
	close_pair();
}

static void noise(void)
{
	unsigned char b[64];
	struct frame f;

	srand(1);
	for (int round = 0; round < 20000; round++) {
		size_t n = 12 + (size_t)rand() % 40;

		for (size_t i = 0; i < n; i++)
			b[i] = rand() & 0xff;
		memcpy(b, "GC\1\0", 4);
		b[4] = 1 + rand() % 12;
		memset(b + 5, 0, 7);
		b[8] = (unsigned char)(n - 12 - (rand() & 1));
		if (round & 1)
			for (size_t i = 12; i < n; i += 3)
				b[i] = i % 2 ? '=' : 0;
		open_pair();
		CHECK(write(ours, b, n) == (ssize_t)n);
		if (rx_read(&rx, &f) == 1) {
			frame_get(&f, "X");
			frame_int(&f, "", 0);
			free(frame_vector(&f, ""));
			frame_clear(&f);
		}
		close_pair();
	}
}

static void large(void)
{
	static char value[4 << 20];
	struct frame f;
	struct msg m;
	pid_t pid;

	memset(value, 'x', sizeof(value) - 1);
	open_pair();
	pid = fork();
	if (pid == 0) {
		msg_init(&m, GC_SPAWN);
		for (int i = 0; i < 3; i++)
			msg_str(&m, "ENV", value);
		_exit(msg_send(&m, ours, NULL, 0) != 0);
	}
	CHECK(rx_wait(&rx, &f, 10000) == 1 && frame_count(&f, "ENV") == 3);
	frame_clear(&f);
	msg_init(&m, GC_SPAWN);
	for (int i = 0; i < 5; i++)
		msg_str(&m, "ENV", value);
	CHECK(msg_send(&m, ours, NULL, 0) < 0 && errno == EMSGSIZE);
	close_pair();
}

static void numbers(void)
{
	long long n;

	CHECK(parse_number("12", 0, 12, &n) && n == 12);
	CHECK(!parse_number("13", 0, 12, &n) && !parse_number("", 0, 1, &n) && !parse_number("1x", 0, 9, &n));
	CHECK(!parse_number(NULL, 0, 1, &n) && !parse_number("99999999999999999999", 0, 1, &n));
	CHECK(shell_status(7 << 8) == 7 && shell_status(9) == 137);
}

int main(void)
{
	round_trip();
	in_pieces();
	refused("XX\1\0\7\0\0\0\0\0\0\0", 12);
	refused("GC\2\0\7\0\0\0\0\0\0\0", 12);
	refused("GC\1\0\17\0\0\0\0\0\0\0", 12);
	refused("GC\1\0\7\0\0\0\1\0\0\1", 12);       /* just above 16 MiB */
	refused("GC\1\0\14\0\0\0\3\0\0\0A=b", 15);   /* not ended */
	refused("GC\1\0\14\0\0\0\4\0\0\0abc\0", 16); /* no '=' */
	refused("GC\1\0\14\0\0\0\6\0\0\0a=b\0c\0", 18);
	refused("GC\1\0\14\0\0\0\6\0\0\0a=b", 15); /* cut off */
	noise();
	large();
	numbers();
	puts("wire: ok");
	return 0;
}
