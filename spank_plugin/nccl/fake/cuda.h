/* SPDX-License-Identifier: Apache-2.0 */
/* The fake driver's streams, for the fake NCCL and the test program. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

typedef struct CUstream_st *stream_t;

stream_t fake_stream(void);
void fake_stream_end(stream_t s);
/* Run work(arg) in the stream's thread, after all that was enqueued before. */
void fake_enqueue(stream_t s, void (*work)(void *), void *arg);
void fake_stream_wait(stream_t s);
void fake_capture(stream_t s, int on);

#endif
