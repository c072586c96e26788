/* SPDX-License-Identifier: Apache-2.0 */
/* PMI between a task and us, who are slurmstepd, through restores. */
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

#define INIT1 "cmd=init pmi_version=1 pmi_subversion=1\n"
#define ANSWER1 "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"

static int pmi[2], input[2];

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

	rx_init(&agent, wire_connect(lab_path));
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
	rx_init(&rx, wire_connect(lab_path));
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
	spawn(task, lab_address, "cat <&$PMI_FD & while IFS= read -r l; do printf \"$l\" >&$PMI_FD; done; kill %1; exit 0",
	      (int[]){ input[0], null, null, pmi[1] }, 4, env);
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

int main(void)
{
	CHECK(pipe2(input, O_CLOEXEC) == 0);
	lab_start();
	pmi_version_1();
	pmi_version_2();
	lab_end();
	puts(geteuid() ? "pmi: ok (without root: no DETACH)" : "pmi: ok");
	return 0;
}
