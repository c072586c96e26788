/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "test_lab.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capsule.h"
#include "test_check.h"
#include "util.h"

char lab_dir[64], lab_path[128], lab_address[64];
struct rx rx;
int null;
static pid_t shepherd;
static int listener;

static void start(void)
{
	static struct capsule_args a = { .control = -1 };
	char text[64];
	int sync[2];

	CHECK(pipe2(sync, O_CLOEXEC) == 0);
	a.run_dir = lab_dir;
	a.sync = sync[1];
	shepherd = fork();
	if (shepherd == 0)
		_exit(shepherd_main(&a));
	close(sync[1]);
	CHECK(read(sync[0], text, sizeof(text)) > 2 && text[0] == 'R');
	close(sync[0]);
}

static void end_shepherd(void)
{
	if (shepherd > 0)
		kill(shepherd, SIGKILL);
}

static void listen_here(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	socklen_t n = sizeof(a);

	listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(bind(listener, (struct sockaddr *)&a, sizeof(a)) == 0 && listen(listener, 64) == 0);
	CHECK(getsockname(listener, (struct sockaddr *)&a, &n) == 0);
	snprintf(lab_address, sizeof(lab_address), "127.0.0.1:%d", ntohs(a.sin_port));
}

void expect_on(struct rx *from, uint32_t type, struct frame *f)
{
	CHECK(rx_wait(from, f, 10000) == 1);
	if (f->type != type)
		fprintf(stderr, "got %u: %s\n", f->type, frame_get(f, "MSG"));
	CHECK(f->type == type);
}

void expect(uint32_t type)
{
	struct frame f;

	expect_on(&rx, type, &f);
	frame_clear(&f);
}

void request(uint32_t type, const char *task)
{
	struct msg m;

	msg_init(&m, type);
	msg_str(&m, "TASK", task);
	CHECK(msg_send(&m, rx.fd, NULL, 0) == 0);
}

void spawn(const char *task, const char *where, const char *script, const int *fds, int nfds, const char *env)
{
	struct msg m;

	msg_init(&m, GC_SPAWN);
	msg_str(&m, "TASK", task);
	msg_str(&m, "CWD", "/");
	msg_int(&m, "RANK", 12);
	msg_str(&m, "STDIO", where);
	msg_str(&m, "TOKEN", TOKEN);
	msg_str(&m, "ARG", "bash");
	msg_str(&m, "ARG", "-c");
	msg_str(&m, "ARG", script);
	msg_str(&m, "ENV", "PATH=/usr/bin:/bin");
	msg_str(&m, "ENV", env);
	CHECK(msg_send(&m, rx.fd, fds, nfds) == 0);
}

void exactly(int fd, void *to, size_t n)
{
	char *p = to;

	while (n) {
		struct pollfd q = { .fd = fd, .events = POLLIN };
		ssize_t r;

		CHECK(poll(&q, 1, 10000) == 1);
		r = read(fd, p, n);
		CHECK(r > 0);
		p += r;
		n -= (size_t)r;
	}
}

int task_connection(void)
{
	char hello[sizeof(TOKEN " 12\n")] = "";
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

	CHECK(fd >= 0);
	exactly(fd, hello, sizeof(hello) - 1);
	CHECK_STR(TOKEN " 12\n", hello);
	return fd;
}

void send_piece(int fd, const char *data, size_t n)
{
	unsigned char h[5] = { 0, n & 0xff, n >> 8 & 0xff, n >> 16 & 0xff, 0 };

	CHECK(write_all(fd, h, 5) == 0 && write_all(fd, data, n) == 0);
}

void lab_start(void)
{
	signal(SIGPIPE, SIG_IGN);
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	snprintf(lab_dir, sizeof(lab_dir), "/tmp/gpucr-test.XXXXXX");
	CHECK(mkdtemp(lab_dir));
	snprintf(lab_path, sizeof(lab_path), "%s/user", lab_dir);
	CHECK(mkdir(lab_path, 0700) == 0);
	snprintf(lab_path, sizeof(lab_path), "%s/user/shepherd.sock", lab_dir);
	start();
	atexit(end_shepherd);
	listen_here();
	rx_init(&rx, wire_connect(lab_path));
	CHECK(rx.fd >= 0);
}

void lab_end(void)
{
	char name[160];

	CHECK(waitpid(shepherd, NULL, WNOHANG) == 0);
	kill(shepherd, SIGKILL);
	waitpid(shepherd, NULL, 0);
	shepherd = 0;
	rx_close(&rx);
	unlink(lab_path);
	snprintf(name, sizeof(name), "%s/user", lab_dir);
	rmdir(name);
	rmdir(lab_dir);
}
