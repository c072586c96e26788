// SPDX-License-Identifier: Apache-2.0
// gpucr-copier: moves memory of processes that stand still, for the agent's worker, which has no right to touch them.
//
//   gpucr-copier read|write WINDOW BYTES CPUS SOCKETS PROCESSES
//   gpucr-copier --version
//
// process_vm_readv and process_vm_writev move several times as much as /proc/PID/mem, and more with each thread, but need
// the right to trace a process. So this program has it, and nothing else: no file, no other process than those of
// PROCESSES, and only one of both directions. One thread serves each socket.
//
// WINDOW: descriptor of memory shared with the worker, BYTES, then a page with the bytes that each socket has moved, in 64
// bits, in the order of SOCKETS. CPUS: processors
// to keep to, "-" for any. SOCKETS: descriptors (SOCK_SEQPACKET). PROCESSES: NSPID:PID:PIDFD, by the number inside the
// namespace that the worker names it with. Lists have commas. A request is `struct request`, an answer `struct answer`.
// It ends when nobody is left at the other ends.
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "marks.h"
#include "util.h"

enum { MAX_LANES = 64, MAX_SPANS = 1024, BAD_USAGE = 64 };
static const char ready[] = "gpucr-copier 2\n"; // the version of all that is said here; engine/copier.py has it, too

struct span { // `size` bytes at `at` in the window, at `address` in the process
	uint64_t at, address, size;
};

enum what { MOVE, MARK };

struct request { // MARK: a span is a chunk, whose place in the window does not count; key: of the marks
	uint32_t nspid, count, what, unused;
	unsigned char key[KEY_BYTES];
	struct span spans[MAX_SPANS];
};

struct answer { // status: 0, or the error number of the span at `address`; ESRCH: the process is gone
	int32_t status;
	uint32_t count; // of marks; one of zero bytes says that all bytes are zero
	uint64_t address;
	unsigned char marks[MAX_SPANS][TAG_BYTES];
};

struct process {
	uint32_t nspid;
	pid_t pid;
	int pidfd;
};

struct lane {
	int sock;
	volatile uint64_t *moved;
	struct request request;
	struct answer answer;
	struct iovec here[MAX_SPANS], there[MAX_SPANS];
	unsigned char chunk[CHUNK_BYTES];
};

static bool writing;
static char *window;
static size_t window_bytes, process_count;
static struct process *processes;

static bool has_ended(const struct process *process)
{
	struct pollfd ended = { .fd = process->pidfd, .events = POLLIN };

	return poll(&ended, 1, 0) != 0;
}

static const struct process *find(uint32_t nspid)
{
	for (size_t i = 0; i < process_count; i++)
		if (processes[i].nspid == nspid)
			return &processes[i];
	return NULL;
}

// Moves spans one after another; the lane's ranges are used up.
static void move_spans(struct lane *lane, const struct process *process, struct iovec *here, struct iovec *there, size_t count)
{
	while (count > 0) {
		ssize_t moved = writing ? process_vm_writev(process->pid, here, count, there, count, 0) :
					  process_vm_readv(process->pid, here, count, there, count, 0);

		if (moved <= 0) {
			lane->answer.status = moved < 0 ? errno : EFAULT;
			lane->answer.address = (uintptr_t)there->iov_base;
			return;
		}
		*lane->moved += moved;
		for (size_t left = moved; left > 0;) {
			size_t part = left < here->iov_len ? left : here->iov_len;

			here->iov_base = (char *)here->iov_base + part;
			there->iov_base = (char *)there->iov_base + part;
			here->iov_len -= part, there->iov_len -= part, left -= part;
			if (here->iov_len == 0)
				here++, there++, count--;
		}
	}
}

// Each chunk is marked while it is in the processor's cache.
static void mark_spans(struct lane *lane, const struct process *process)
{
	struct answer *answer = &lane->answer;
	EVP_CIPHER_CTX *context = chunk_cipher(lane->request.key, 1);

	if (context == NULL)
		answer->status = ENOTSUP;
	for (size_t i = 0; i < lane->request.count && answer->status == 0; i++) {
		struct chunk c = { .plain = lane->chunk, .rest = lane->chunk, .first = lane->here[i].iov_len, .size = lane->here[i].iov_len };

		move_spans(lane, process, &lane->here[i], &lane->there[i], 1);
		if (answer->status == 0 && !chunk_mark(context, &c))
			answer->status = ENOTSUP;
		memcpy(answer->marks[answer->count++], c.tag, TAG_BYTES);
	}
	if (answer->status != 0)
		answer->count = 0;
	EVP_CIPHER_CTX_free(context);
}

// The number of a process may be another one's as soon as it has been reaped: so its descriptor is asked before and after.
static void serve_request(struct lane *lane)
{
	const struct process *process = find(lane->request.nspid);

	if (process == NULL || has_ended(process)) {
		lane->answer.status = ESRCH;
		return;
	}
	if (lane->request.what == MARK)
		mark_spans(lane, process);
	else
		move_spans(lane, process, lane->here, lane->there, lane->request.count);
	if (has_ended(process))
		lane->answer.status = ESRCH, lane->answer.count = 0;
}

// Whether a request of `size` bytes is whole and keeps to the window; the lane's ranges are set then.
static bool understand(struct lane *lane, size_t size)
{
	const struct request *request = &lane->request;

	if (size < offsetof(struct request, spans) || request->count > MAX_SPANS || request->what > (writing ? MOVE : MARK) ||
	    size != offsetof(struct request, spans) + request->count * sizeof(struct span))
		return false;
	for (size_t i = 0; i < request->count; i++) {
		const struct span *span = &request->spans[i];
		bool fits = request->what == MARK ? span->size <= CHUNK_BYTES :
						    span->size <= window_bytes && span->at <= window_bytes - span->size;

		if (span->size == 0 || !fits)
			return false;
		lane->here[i] = (struct iovec){ request->what == MARK ? (char *)lane->chunk : window + span->at, span->size };
		lane->there[i] = (struct iovec){ (void *)(uintptr_t)span->address, span->size };
	}
	return true;
}

static void *serve(void *argument)
{
	struct lane *lane = argument;

	for (;;) {
		ssize_t size = recv(lane->sock, &lane->request, sizeof(lane->request), 0);
		struct answer *answer = &lane->answer;

		if (size < 0 && errno == EINTR)
			continue;
		if (size <= 0)
			break;
		answer->status = 0, answer->count = 0, answer->address = 0;
		if (understand(lane, size))
			serve_request(lane);
		else
			answer->status = EINVAL;
		if (send(lane->sock, answer, offsetof(struct answer, marks) + answer->count * TAG_BYTES, MSG_NOSIGNAL) < 0)
			break;
	}
	close(lane->sock);
	return NULL;
}

// The next number of a list, ended by `end` or the text's end; -1 where there is none.
static long take(char **text, char end)
{
	char *rest;
	long number = strtol(*text, &rest, 10);

	if (rest == *text || number < 0 || (*rest != end && *rest != '\0'))
		return -1;
	*text = *rest == '\0' ? rest : rest + 1;
	return number;
}

static bool read_processes(char *text)
{
	processes = calloc(strlen(text) / 2 + 1, sizeof(*processes));
	if (processes == NULL)
		return false;
	while (*text != '\0') {
		long nspid = take(&text, ':'), pid = take(&text, ':'), pidfd = take(&text, ',');

		if (nspid <= 0 || pid <= 0 || pidfd < 0)
			return false;
		processes[process_count++] = (struct process){ nspid, pid, pidfd };
	}
	return true;
}

// Only a wish: memory that is written first by a thread lies near it.
static bool keep_to(char *text)
{
	cpu_set_t wanted;

	CPU_ZERO(&wanted);
	if (strcmp(text, "-") == 0)
		return true;
	while (*text != '\0') {
		long number = take(&text, ',');

		if (number < 0)
			return false;
		if (number < CPU_SETSIZE)
			CPU_SET(number, &wanted);
	}
	sched_setaffinity(0, sizeof(wanted), &wanted);
	return true;
}

// Nobody with the right to trace.
static int drop_rights(void)
{
	enum { NOBODY = 65534 };
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {
		{ .effective = 1u << CAP_SYS_PTRACE, .permitted = 1u << CAP_SYS_PTRACE }
	};

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return -1;
	if (geteuid() != 0)
		return 0;
	if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0 || setgroups(0, NULL) < 0 || setresgid(NOBODY, NOBODY, NOBODY) < 0 ||
	    setresuid(NOBODY, NOBODY, NOBODY) < 0)
		return -1;
	return syscall(SYS_capset, &head, data);
}

int main(int argc, char **argv)
{
	static struct lane *lanes[MAX_LANES];
	pthread_t threads[MAX_LANES];
	long long fd, bytes;
	size_t count = 0;

	if (argc == 2 && strcmp(argv[1], "--version") == 0)
		return write(STDOUT_FILENO, ready, sizeof(ready) - 1) < 0;
	if (argc != 7 || !parse_number(argv[2], 0, INT32_MAX, &fd) || !parse_number(argv[3], 4096, INT32_MAX, &bytes)) {
		say("copier: bad arguments");
		return BAD_USAGE;
	}
	writing = strcmp(argv[1], "write") == 0;
	window_bytes = bytes;
	if ((!writing && strcmp(argv[1], "read") != 0) || !keep_to(argv[4]) || !read_processes(argv[6])) {
		say("copier: bad arguments");
		return BAD_USAGE;
	}
	for (char *text = argv[5]; *text != '\0'; count++) {
		long sock = take(&text, ',');

		if (sock < 0 || count == MAX_LANES) {
			say("copier: bad sockets");
			return BAD_USAGE;
		}
		lanes[count] = calloc(1, sizeof(*lanes[count]));
		if (lanes[count] == NULL)
			return 1;
		lanes[count]->sock = sock;
	}
	window = mmap(NULL, window_bytes + getpagesize(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (window == MAP_FAILED) {
		say("copier: no window: %s", strerror(errno));
		return 1;
	}
	for (size_t i = 0; i < count; i++)
		lanes[i]->moved = (uint64_t *)(window + window_bytes) + i;
	if (drop_rights() < 0) {
		say("copier: cannot drop rights: %s", strerror(errno));
		return 1;
	}
	for (size_t i = 0; i < count; i++)
		if (pthread_create(&threads[i], NULL, serve, lanes[i]) != 0) {
			say("copier: no thread");
			return 1;
		}
	if (write(STDOUT_FILENO, ready, sizeof(ready) - 1) < 0)
		return 1;
	close(STDOUT_FILENO);
	for (size_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	return 0;
}
