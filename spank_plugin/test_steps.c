/* SPDX-License-Identifier: Apache-2.0 */
/* Stdio of steps over TCP, and requests of proxies: we are supervisor, proxy and, as root, the agent. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test_check.h"
#include "test_lab.h"
#include "util.h"

/* Everything until the end, by kind; returns the bytes, checks that each end came once. */
struct got {
	size_t len[3];
	int ends[3];
	char data[3][4096];
	unsigned sum[3];
};

static void receive_all(int fd, struct got *g)
{
	static char data[65536];
	unsigned char h[5];

	memset(g, 0, sizeof(*g));
	for (;;) {
		struct pollfd q = { .fd = fd, .events = POLLIN };
		ssize_t r;
		size_t n;

		CHECK(poll(&q, 1, 10000) == 1);
		r = recv(fd, h, 1, 0);
		CHECK(r >= 0);
		if (r == 0)
			return;
		exactly(fd, h + 1, 4);
		n = h[1] | h[2] << 8 | (size_t)h[3] << 16;
		CHECK((h[0] == 1 || h[0] == 2) && n <= sizeof(data) && !h[4] && !g->ends[h[0]]);
		g->ends[h[0]] += n == 0;
		exactly(fd, data, n);
		for (size_t i = 0; i < n; i++) {
			if (g->len[h[0]] < sizeof(g->data[0]) - 1)
				g->data[h[0]][g->len[h[0]]] = data[i];
			g->sum[h[0]] = g->sum[h[0]] * 31 + (unsigned char)data[i];
			g->len[h[0]]++;
		}
	}
}

static void stdio_over_tcp(void)
{
	int fds[3] = { -1, null, null }, unused[2], fd;
	struct got g;

	CHECK(pipe2(unused, O_CLOEXEC) == 0);
	fds[0] = unused[0];
	spawn("io", lab_address, "read a; echo got $a; echo err >&2; cat; exit 3", fds, 3, "A=b");
	fd = task_connection();
	expect(GC_SPAWNED);
	close(unused[0]);
	struct pollfd broken = { .fd = unused[1] };
	CHECK(poll(&broken, 1, 1000) == 1 && broken.revents == POLLERR); /* what is not used was closed at once */
	close(unused[1]);
	request(GC_GO, "io");
	send_piece(fd, "lin", 3);
	send_piece(fd, "e\nrest", 6);
	send_piece(fd, "", 0);
	receive_all(fd, &g);
	CHECK_STR("got line\nrest", g.data[1]);
	CHECK_STR("err\n", g.data[2]);
	CHECK(g.ends[1] == 1 && g.ends[2] == 1);
	close(fd);
	expect(GC_EXITED);
}

static void amounts(void)
{
	enum { PIECE = 50000, COUNT = 60 };
	static char data[PIECE];
	int fds[3] = { null, null, null }, fd, zero[2];
	unsigned sum = 0;
	struct got g;
	pid_t writer;

	CHECK(pipe2(zero, O_CLOEXEC) == 0);
	fds[0] = zero[0];
	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (char)(i * 7 + i / 251);
	spawn("much", lab_address, "exec tee /dev/stderr", fds, 3, "A=b");
	fd = task_connection();
	expect(GC_SPAWNED);
	request(GC_GO, "much");
	writer = fork();
	if (writer == 0) {
		for (int i = 0; i < COUNT; i++)
			send_piece(fd, data, sizeof(data));
		send_piece(fd, "", 0);
		_exit(0);
	}
	usleep(300000); /* nobody reads: what the task writes must wait, in bounded memory, without loss */
	receive_all(fd, &g);
	for (int i = 0; i < COUNT; i++)
		for (size_t k = 0; k < sizeof(data); k++)
			sum = sum * 31 + (unsigned char)data[k];
	CHECK(g.len[1] == (size_t)PIECE * COUNT && g.len[2] == g.len[1] && g.sum[1] == sum && g.sum[2] == sum);
	waitpid(writer, NULL, 0);
	close(fd);
	close(zero[0]);
	close(zero[1]);
	expect(GC_EXITED);
}

static void files_stay_files(void)
{
	int fds[3] = { null, -1, -1 }, fd;
	char name[160], text[64] = "";
	struct got g;

	snprintf(name, sizeof(name), "%s/out", lab_dir);
	fds[1] = open(name, O_CREAT | O_RDWR | O_APPEND | O_CLOEXEC, 0600);
	fds[2] = open(name, O_RDWR | O_APPEND | O_CLOEXEC);
	spawn("file", lab_address, "for i in 1 2 3; do echo o$i; echo e$i >&2; done; readlink /proc/self/fd/0", fds, 3, "A=b");
	fd = task_connection();
	expect(GC_SPAWNED);
	request(GC_GO, "file");
	receive_all(fd, &g);
	CHECK(!g.len[1] && !g.len[2] && !g.ends[1] && !g.ends[2]);
	close(fd);
	expect(GC_EXITED);
	CHECK(pread(fds[1], text, sizeof(text) - 1, 0) > 0);
	CHECK_STR("o1\ne1\no2\ne2\no3\ne3\n/dev/null\n", text);
	close(fds[1]);
	close(fds[2]);
	unlink(name);
}

static void nobody_there(void)
{
	static const char *const bad[] = { "127.0.0.1:1", "127.0.0.1", "nowhere:80", "127.0.0.1:99999", "" };
	int fds[3] = { null, null, null };
	struct frame f;

	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		spawn("no", bad[i], "true", fds, 3, "A=b");
		expect_on(&rx, GC_FAILED, &f);
		CHECK(frame_int(&f, "ERRNO", 0) == (i ? EINVAL : ECONNREFUSED));
		CHECK(strstr(frame_get(&f, "MSG"), "reach the step's srun"));
		frame_clear(&f);
	}
}

static void proxy_goes(void)
{
	int fds[3] = { null, null, null }, fd;

	spawn("gone", lab_address, "head -c 3000000 /dev/zero; exit 4", fds, 3, "A=b");
	fd = task_connection();
	expect(GC_SPAWNED);
	close(fd);
	request(GC_GO, "gone");
	expect(GC_EXITED); /* the output is dropped, nothing hangs */
}

/* --- requests of proxies --- */

static void srun(struct rx *proxy, const char *key)
{
	struct msg m;

	rx_init(proxy, wire_connect(lab_path));
	CHECK(proxy->fd >= 0);
	msg_init(&m, GC_SRUN);
	msg_str(&m, "KEY", key);
	msg_str(&m, "ARG", "-n2");
	CHECK(msg_send(&m, proxy->fd, NULL, 0) == 0);
}

static void send_key(int fd, uint32_t type, const char *key, const char *name, const char *value)
{
	struct msg m;

	msg_init(&m, type);
	if (key)
		msg_str(&m, "KEY", key);
	if (name)
		msg_str(&m, name, value);
	CHECK(msg_send(&m, fd, NULL, 0) == 0);
}

static void has(struct rx *from, uint32_t type, const char *key, const char *name, const char *value)
{
	struct frame f;

	expect_on(from, type, &f);
	CHECK_STR(key, frame_get(&f, "KEY"));
	if (name)
		CHECK_STR(value, frame_get(&f, name));
	frame_clear(&f);
}

static void nothing(struct rx *from)
{
	struct frame f;

	CHECK(rx_wait(from, &f, 100) == 0);
}

static void control(struct rx *agent, const char *known)
{
	rx_init(agent, wire_connect(lab_path));
	send_key(agent->fd, GC_CONTROL, NULL, known ? "KNOWN" : NULL, known);
}

static void requests(void)
{
	struct rx a, b, c, agent, second;
	struct frame f;
	char big[60000];

	srun(&a, "a");
	control(&agent, NULL);
	has(&agent, GC_SRUN, "a", "ARG", "-n2");
	srun(&b, "b");
	has(&agent, GC_SRUN, "b", "ARG", "-n2");
	send_key(b.fd, GC_SRUNSIGNAL, "b", "SIGNAL", "15");
	has(&agent, GC_SRUNSIGNAL, "b", "SIGNAL", "15");
	send_key(agent.fd, GC_PLAN, "a", "TASKS", "2");
	send_key(agent.fd, GC_PLAN, "nobody", "TASKS", "2");
	has(&a, GC_PLAN, "a", "TASKS", "2");
	srun(&c, "a"); /* the key is taken */
	expect_on(&c, GC_FAILED, &f);
	frame_clear(&f);
	CHECK(rx_wait(&c, &f, 1000) == -1);
	rx_close(&c);

	/* the agent goes: signals wait; it comes and knows one of them */
	rx_close(&agent);
	send_key(a.fd, GC_SRUNSIGNAL, "a", "SIGNAL", "2");
	send_key(b.fd, GC_SRUNSIGNAL, "b", "SIGNAL", "10");
	usleep(50000);
	control(&agent, "a");
	has(&agent, GC_SRUNSIGNAL, "a", "SIGNAL", "2");
	has(&agent, GC_SRUN, "b", "ARG", "-n2");
	has(&agent, GC_SRUNSIGNAL, "b", "SIGNAL", "10");

	/* another CONTROL replaces it */
	control(&second, "a");
	has(&second, GC_SRUN, "b", "ARG", "-n2");
	CHECK(rx_wait(&agent, &f, 1000) == -1);
	rx_close(&agent);
	agent = second;

	/* a proxy that does not read holds the agent up, not the shepherd; nothing is lost */
	memset(big, 'x', sizeof(big) - 1);
	big[sizeof(big) - 1] = '\0';
	for (int i = 0; i < 20; i++)
		send_key(agent.fd, GC_OUTPUT, "a", "DATA", big);
	send_key(agent.fd, GC_OUTPUT, "b", "DATA", "to b");
	has(&b, GC_OUTPUT, "b", "DATA", "to b");
	/* a checkpoint: CONTROL ends, what it sent before is taken; the proxies stay */
	send_key(agent.fd, GC_SRUNEND, "b", "STATUS", "256");
	send_key(rx.fd, GC_DETACH, NULL, NULL, NULL);
	expect(GC_DETACHED);
	rx_close(&rx);
	has(&agent, GC_DETACHED, NULL, NULL, NULL);
	CHECK(rx_wait(&agent, &f, 1000) == -1);
	rx_close(&agent);
	rx_init(&rx, wire_connect(lab_path));
	for (int i = 0; i < 20; i++)
		has(&a, GC_OUTPUT, "a", "DATA", big);
	has(&b, GC_SRUNEND, "b", "STATUS", "256");
	nothing(&a);
	srun(&c, "c");
	control(&agent, NULL);
	has(&agent, GC_SRUN, "a", "ARG", "-n2"); /* b has ended and is not told again */
	has(&agent, GC_SRUN, "c", "ARG", "-n2");
	rx_close(&b);

	/* proxies that go: srun is killed when the agent has it */
	rx_close(&a);
	has(&agent, GC_SRUNSIGNAL, "a", "SIGNAL", "9");
	rx_close(&agent);
	rx_close(&c);
	srun(&b, "never told");
	usleep(50000);
	rx_close(&b);
	usleep(50000);
	control(&agent, "c");
	has(&agent, GC_SRUNSIGNAL, "c", "SIGNAL", "9");
	nothing(&agent);
	/* only CONTROL speaks to proxies */
	send_key(rx.fd, GC_SRUNEND, "c", "STATUS", "0");
	CHECK(rx_wait(&rx, &f, 1000) == -1);
	rx_close(&rx);
	rx_close(&agent);
	rx_init(&rx, wire_connect(lab_path));
}

int main(void)
{
	lab_start();
	stdio_over_tcp();
	amounts();
	files_stay_files();
	nobody_there();
	proxy_goes();
	if (geteuid() == 0)
		requests();
	lab_end();
	puts(geteuid() ? "steps: ok (without root: no CONTROL)" : "steps: ok");
	return 0;
}
