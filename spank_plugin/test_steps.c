/* SPDX-License-Identifier: Apache-2.0 */
/* A real shepherd and its step tasks: we are supervisor, proxy, slurmstepd's PMI and, as root, the agent. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
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
#include "wire.h"

#define TOKEN "00112233445566778899aabbccddeeff"
#define INIT1 "cmd=init pmi_version=1 pmi_subversion=1\n"
#define ANSWER1 "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"

static char dir[64], path[128], address[64];
static struct rx rx;
static pid_t shepherd;
static int listener, null;

static void start(void)
{
	static struct capsule_args a = { .control = -1 };
	char text[64];
	int sync[2];

	CHECK(pipe2(sync, O_CLOEXEC) == 0);
	a.run_dir = dir;
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
	snprintf(address, sizeof(address), "127.0.0.1:%d", ntohs(a.sin_port));
}

static void expect_on(struct rx *from, uint32_t type, struct frame *f)
{
	CHECK(rx_wait(from, f, 10000) == 1);
	if (f->type != type)
		fprintf(stderr, "got %u: %s\n", f->type, frame_get(f, "MSG"));
	CHECK(f->type == type);
}

static void expect(uint32_t type)
{
	struct frame f;

	expect_on(&rx, type, &f);
	frame_clear(&f);
}

static void request(uint32_t type, const char *task)
{
	struct msg m;

	msg_init(&m, type);
	msg_str(&m, "TASK", task);
	CHECK(msg_send(&m, rx.fd, NULL, 0) == 0);
}

static void spawn(const char *task, const char *where, const char *script, const int *fds, int nfds, const char *env)
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

static void exactly(int fd, void *to, size_t n)
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

static int task_connection(void)
{
	char hello[sizeof(TOKEN " 12\n")] = "";
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

	CHECK(fd >= 0);
	exactly(fd, hello, sizeof(hello) - 1);
	CHECK_STR(TOKEN " 12\n", hello);
	return fd;
}

static void send_piece(int fd, const char *data, size_t n)
{
	unsigned char h[5] = { 0, n & 0xff, n >> 8 & 0xff, n >> 16 & 0xff, 0 };

	CHECK(write_all(fd, h, 5) == 0 && write_all(fd, data, n) == 0);
}

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
	spawn("io", address, "read a; echo got $a; echo err >&2; cat; exit 3", fds, 3, "A=b");
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
	spawn("much", address, "exec tee /dev/stderr", fds, 3, "A=b");
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

	snprintf(name, sizeof(name), "%s/out", dir);
	fds[1] = open(name, O_CREAT | O_RDWR | O_APPEND | O_CLOEXEC, 0600);
	fds[2] = open(name, O_RDWR | O_APPEND | O_CLOEXEC);
	spawn("file", address, "for i in 1 2 3; do echo o$i; echo e$i >&2; done; readlink /proc/self/fd/0", fds, 3, "A=b");
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

	spawn("gone", address, "head -c 3000000 /dev/zero; exit 4", fds, 3, "A=b");
	fd = task_connection();
	expect(GC_SPAWNED);
	close(fd);
	request(GC_GO, "gone");
	expect(GC_EXITED); /* the output is dropped, nothing hangs */
}

/* --- PMI --- */

static int pmi[2], io[3];

static void attach(const char *task, bool restored, const char *held)
{
	struct frame f;
	struct msg m;

	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pmi) == 0);
	msg_init(&m, GC_ATTACHTASK);
	msg_str(&m, "TASK", task);
	msg_int(&m, "RESTORED", restored);
	CHECK(msg_send(&m, rx.fd, (int[]){ null, null, null, pmi[1] }, 4) == 0);
	close(pmi[1]);
	expect_on(&rx, GC_ATTACHED, &f);
	CHECK_STR(held, frame_get(&f, "HELD"));
	frame_clear(&f);
}

static void says(const char *want)
{
	char got[512] = "";

	exactly(pmi[0], got, strlen(want));
	CHECK_STR(want, got);
}

static void silent(void)
{
	struct pollfd q = { .fd = pmi[0], .events = POLLIN };

	CHECK(poll(&q, 1, 100) == 0);
}

static void say_to(const char *text)
{
	CHECK(write_all(pmi[0], text, strlen(text)) == 0);
}

/* DETACH; checks the state that is told of a task. */
static void detach(const char *task, const char *state)
{
	struct rx agent;
	struct frame f;
	struct msg m;
	size_t pos = 0, found = 0;
	const char *v;
	char c;

	rx_init(&agent, wire_connect(path));
	msg_init(&m, GC_DETACH);
	CHECK(msg_send(&m, agent.fd, NULL, 0) == 0);
	expect_on(&agent, GC_DETACHED, &f);
	while ((v = frame_next(&f, "TASKS", &pos))) {
		const char *got = strchr(v + strlen(task) + 1, ':');

		if (strncmp(v, task, strlen(task)) || v[strlen(task)] != ':')
			continue;
		found++;
		CHECK(got);
		CHECK_STR(state, got + 1);
	}
	CHECK(found == 1);
	frame_clear(&f);
	CHECK(rx_wait(&agent, &f, 10000) == -1);
	rx_close(&agent);
	expect(GC_DETACHED);
	CHECK(rx_wait(&rx, &f, 10000) == -1);
	rx_close(&rx);
	rx_init(&rx, wire_connect(path));
	if (pmi[0] >= 0) {
		while (recv(pmi[0], &c, 1, 0) > 0)
			;
		close(pmi[0]);
		pmi[0] = -1;
	}
}

/* A task that says the lines that we put on its input, and prints what it hears. */
static void pmi_task(const char *task)
{
	char env[32];

	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pmi) == 0);
	snprintf(env, sizeof(env), "PMI_FD=%d", pmi[1]);
	spawn(task, address, "cat <&$PMI_FD & while IFS= read -r l; do printf \"$l\" >&$PMI_FD; done; kill %1; exit 0",
	      (int[]){ io[0], null, null, pmi[1] }, 4, env);
	close(pmi[1]);
}

static void hears(int fd, const char *want)
{
	char got[512] = "";
	unsigned char h[5];
	size_t n = 0;

	while (n < strlen(want)) {
		exactly(fd, h, 5);
		CHECK(h[0] == 1 && n + (size_t)h[1] < sizeof(got));
		exactly(fd, got + n, h[1]);
		n += h[1];
	}
	CHECK_STR(want, got);
}

static void tell(int fd, const char *line)
{
	send_piece(fd, line, strlen(line));
	send_piece(fd, "\n", 1);
}

static void pmi_version_1(void)
{
	int fd;

	pmi_task("p");
	fd = task_connection();
	expect(GC_SPAWNED);
	if (geteuid() == 0) {
		detach("p", "new:running");
		attach("p", false, "1"); /* held through a checkpoint */
	}
	request(GC_GO, "p");
	tell(fd, "cmd=init pmi_version=1 pmi_subversion=1\\n");
	says(INIT1);
	if (geteuid() == 0) {
		/* init without answer: the new slurmstepd gets it, and its answer is the task's */
		detach("p", "busy:running");
		attach("p", true, "0");
		says(INIT1);
	}
	say_to(ANSWER1);
	hears(fd, ANSWER1);
	tell(fd, "cmd=get_maxes\\n");
	says("cmd=get_maxes\n");
	say_to("cmd=maxes ");
	say_to("kvsname_max=256\n");
	hears(fd, "cmd=maxes kvsname_max=256\n");
	if (geteuid() == 0) {
		/* idle: init is replayed and its answer kept from the task, though it comes in pieces */
		detach("p", "idle:running");
		tell(fd, "cmd=get_appnum\\n");
		usleep(100000);
		attach("p", true, "0");
		says(INIT1);
		silent(); /* the request waits for that answer */
		say_to("cmd=response_to_init pmi_ver");
		say_to("sion=1 rc=0\n");
		says("cmd=get_appnum\n");
		say_to("cmd=appnum appnum=0\n");
		hears(fd, "cmd=appnum appnum=0\n");
		/* busy: the same slurmstepd goes on with what it has heard; a new one is asked again */
		tell(fd, "cmd=barrier_in\\n");
		says("cmd=barrier_in\n");
		detach("p", "busy:running");
		attach("p", false, "0");
		silent();
		detach("p", "busy:running");
		attach("p", true, "0");
		says(INIT1);
		say_to(ANSWER1);
		says("cmd=barrier_in\n");
		say_to("cmd=barrier_out rc=0\n");
		hears(fd, "cmd=barrier_out rc=0\n");
		/* an answer that lies in the socket is not lost */
		tell(fd, "cmd=get_my_kvsname\\n");
		says("cmd=get_my_kvsname\n");
		say_to("cmd=my_kvsname kvsname=x\n");
		detach("p", "idle:running");
		hears(fd, "cmd=my_kvsname kvsname=x\n");
		attach("p", false, "0");
	}
	tell(fd, "cmd=finalize\\n");
	says("cmd=finalize\n");
	say_to("cmd=finalize_ack\n");
	hears(fd, "cmd=finalize_ack\n");
	send_piece(fd, "", 0);
	expect(GC_EXITED);
	struct pollfd q = { .fd = pmi[0], .events = POLLIN };
	CHECK(poll(&q, 1, 5000) == 1 && recv(pmi[0], &q, 1, 0) == 0); /* closed with the task */
	close(pmi[0]);
	close(fd);
}

static void pmi_version_2(void)
{
	int fd;

	pmi_task("q");
	fd = task_connection();
	expect(GC_SPAWNED);
	request(GC_GO, "q");
	tell(fd, "cmd=init pmi_version=2 pmi_subversion=0\\n");
	says("cmd=init pmi_version=2 pmi_subversion=0\n");
	say_to("cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0\n");
	hears(fd, "cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0\n");
	tell(fd, "    21cmd=fullinit;pmirank=0");
	says("    21cmd=fullinit;pmirank=0");
	if (geteuid() == 0) {
		detach("q", "busy:running");
		attach("q", true, "0");
		says("cmd=init pmi_version=2 pmi_subversion=0\n");
		say_to("cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0\n");
		says("    21cmd=fullinit;pmirank=0");
	}
	say_to("    10cmd=x;rc=0");
	hears(fd, "    10cmd=x;rc=0");
	if (geteuid() == 0) {
		detach("q", "idle:running");
		attach("q", false, "0");
	}
	send_piece(fd, "", 0);
	expect(GC_EXITED);
	close(pmi[0]);
	close(fd);
}

/* --- requests of proxies --- */

static void srun(struct rx *proxy, const char *key)
{
	struct msg m;

	rx_init(proxy, wire_connect(path));
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
	rx_init(agent, wire_connect(path));
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
	rx_init(&rx, wire_connect(path));
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
	rx_init(&rx, wire_connect(path));
}

int main(void)
{
	char name[160];
	int in[2];

	signal(SIGPIPE, SIG_IGN);
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	snprintf(dir, sizeof(dir), "/tmp/gpucr-test.XXXXXX");
	CHECK(mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/user", dir);
	CHECK(mkdir(path, 0700) == 0);
	snprintf(path, sizeof(path), "%s/user/shepherd.sock", dir);
	CHECK(pipe2(in, O_CLOEXEC) == 0);
	io[0] = in[0];
	start();
	atexit(end_shepherd);
	listen_here();
	rx_init(&rx, wire_connect(path));
	CHECK(rx.fd >= 0);
	stdio_over_tcp();
	amounts();
	files_stay_files();
	nobody_there();
	proxy_goes();
	pmi_version_1();
	pmi_version_2();
	if (geteuid() == 0)
		requests();
	CHECK(waitpid(shepherd, NULL, WNOHANG) == 0);
	kill(shepherd, SIGKILL);
	waitpid(shepherd, NULL, 0);
	shepherd = 0;
	rx_close(&rx);
	unlink(path);
	snprintf(name, sizeof(name), "%s/user", dir);
	rmdir(name);
	rmdir(dir);
	puts(geteuid() ? "steps: ok (without root: no DETACH, no CONTROL)" : "steps: ok");
	return 0;
}
