/* SPDX-License-Identifier: Apache-2.0 */
/* Requests for srun on their way from proxies in the capsule to the agent, and what comes back (docs/protocol.md,
 * "Steps"). Connections are named by their index in the shepherd. */
#ifndef GPUCR_STEPS_H
#define GPUCR_STEPS_H

#include "wire.h"

void steps_init(void);
void steps_request(int c, struct frame *f); /* SRUN; takes the payload over */
void steps_signal(int c, const struct frame *f); /* SRUNSIGNAL */
void steps_control(int c, const struct frame *f); /* CONTROL */
void steps_answer(int c, const struct frame *f); /* PLAN, OUTPUT, SRUNEND */
void steps_conn_gone(int c);
bool steps_is_proxy(int c);
short steps_events(int c); /* what poll() shall watch on this connection */
void steps_push(void);     /* send what goes without waiting */
/* Take what the agent has sent, send what waits for it, until the deadline (now_ms()); then the agent is away. */
void steps_detach(void (*read_all)(int c), long long deadline_ms);

#endif
