/* SPDX-License-Identifier: Apache-2.0 */
/* A real shepherd without capsule; the test is its supervisor, and the proxy that its tasks connect to. */
#ifndef GPUCR_TEST_LAB_H
#define GPUCR_TEST_LAB_H

#include "wire.h"

#define TOKEN "00112233445566778899aabbccddeeff"

extern char lab_dir[64], lab_path[128], lab_address[64]; /* the shepherd's socket; where we listen for its tasks */
extern struct rx rx;                                     /* the supervisor's connection */
extern int null;                                         /* /dev/null */

void lab_start(void);
void lab_end(void);

void expect_on(struct rx *from, uint32_t type, struct frame *f);
void expect(uint32_t type);
void request(uint32_t type, const char *task);
/* A task of rank 12 that runs a bash script. */
void spawn(const char *task, const char *where, const char *script, const int *fds, int nfds, const char *env);
void exactly(int fd, void *to, size_t n);
int task_connection(void); /* accept it, after its first line */
void send_piece(int fd, const char *data, size_t n);

#endif
