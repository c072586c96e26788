/* SPDX-License-Identifier: Apache-2.0 */
/* Frames between supervisor, shepherd, init, hook and agent: docs/protocol.md, byte by byte. */
#ifndef GPUCR_WIRE_H
#define GPUCR_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WIRE_VERSION 1
#define WIRE_HEADER 12
#define WIRE_MAX_PAYLOAD (16u << 20)
#define WIRE_MAX_FDS 8
#define WIRE_SEND_MS 10000 /* a peer that reads nothing for so long is given up */

enum wire_type {
	GC_HELLO = 1, GC_RUN, GC_REFUSE, GC_START, GC_ATTACH, GC_RELEASE, GC_OK, GC_NOTICE, GC_FORWARD, GC_ABSORB, GC_ENDED,
	GC_PRINT, GC_PLACE, GC_PLACED,
	GC_SPAWN = 20, GC_SPAWNED, GC_GO, GC_FAILED, GC_ATTACHTASK, GC_ATTACHED, GC_SIGNAL, GC_EXITED, GC_DETACH, GC_DETACHED,
	GC_CONTROL, GC_SRUN, GC_PLAN, GC_OUTPUT, GC_SRUNEND, GC_SRUNSIGNAL,
	GC_READY = 40, GC_RESTORE, GC_RESULT, GC_ADOPTED,
	GC_HOOK = 50, GC_HOOKRESULT,
	GC_NCCL = 60, GC_NCCLSTATE,
};

/* A received frame. The payload is owned; descriptors that nobody took are closed by frame_clear(). */
struct frame {
	uint32_t type;
	uint32_t len;
	char *payload; /* strings KEY=VALUE, each ended by NUL; NULL when len is 0 */
	int fds[WIRE_MAX_FDS];
	int nfds;
};

/* State of reading from one stream socket; a frame may come in pieces. */
struct rx {
	int fd;
	uint32_t got; /* bytes of header and payload so far */
	unsigned char header[WIRE_HEADER];
	struct frame cur;
};

/* A frame under construction. An error (no memory, NUL or '=' trouble, too long) sticks until msg_send(). */
struct msg {
	uint32_t type;
	char *buf;
	size_t len, cap;
	bool bad;
};

void rx_init(struct rx *rx, int fd);
void rx_close(struct rx *rx);
/* 1: *out holds a frame; 0: not complete yet; -1: end of stream (errno 0), error, or not our protocol (EPROTO).
 * Never blocks. */
int rx_read(struct rx *rx, struct frame *out);
/* The same, waiting up to timeout_ms (-1: for ever); 0 means that the time is over. */
int rx_wait(struct rx *rx, struct frame *out, int timeout_ms);

/* Hand every complete frame to handle(); gone() at the end of the stream or an error. handle() may close rx. */
void rx_drain(struct rx *rx, void (*handle)(struct frame *), void (*gone)(void));

void frame_clear(struct frame *f);
/* First value of a key, or NULL. */
const char *frame_get(const struct frame *f, const char *key);
/* First value as a number, or fallback when absent or malformed. */
long long frame_int(const struct frame *f, const char *key, long long fallback);
/* Next value of a repeated key; *pos starts at 0. NULL at the end. */
const char *frame_next(const struct frame *f, const char *key, size_t *pos);
size_t frame_count(const struct frame *f, const char *key);
/* All values of a key as a NULL-ended vector that points into the payload (free() the vector alone). */
char **frame_vector(const struct frame *f, const char *key);
/* Take descriptor i out of the frame (the caller owns it then); -1 when there is none. */
int frame_take_fd(struct frame *f, int i);

void msg_init(struct msg *m, uint32_t type);
void msg_str(struct msg *m, const char *key, const char *value);
void msg_int(struct msg *m, const char *key, long long value);
void msg_fmt(struct msg *m, const char *key, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Send and free. 0, or -1 with errno (EMSGSIZE/ENOMEM for a bad message, ETIMEDOUT for a deaf peer). */
int msg_send(struct msg *m, int fd, const int *fds, int nfds);
/* The finished frame as bytes of the caller's (free()), for those who may not wait; NULL for a bad message. */
void *msg_bytes(struct msg *m, size_t *size);
/* A message with type and payload of a received frame, to pass it on. */
void msg_copy(struct msg *m, const struct frame *f);

int wire_connect(const char *path); /* descriptor, or -1 with errno */
/* The same, but EPERM when neither root nor our own user listens there. */
int wire_connect_trusted(const char *path);
int wire_listen(const char *path);  /* replaces a stale socket file */
int wire_peer(int fd, int *pid, unsigned *uid); /* SO_PEERCRED */

#endif
