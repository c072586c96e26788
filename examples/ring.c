/* SPDX-License-Identifier: Apache-2.0
 * An allreduce and a ring of sends in each iteration, both checked: a lost, doubled or altered message is noticed at
 * once, and the sum at the end depends on every one.
 * usage: ring [ITERATIONS [MICROSECONDS_PER_ITERATION [DOUBLES_PER_MESSAGE]]]
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void fail(const char *what, int rank, long iteration)
{
	fprintf(stderr, "rank %d, iteration %ld: wrong %s\n", rank, iteration, what);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv)
{
	long iterations = argc > 1 ? atol(argv[1]) : 500;
	long pause_us = argc > 2 ? atol(argv[2]) : 20000;
	int count = argc > 3 ? atoi(argv[3]) : 1000;
	double *out = malloc(sizeof(double) * count), *in = malloc(sizeof(double) * count);
	unsigned long total = 0;
	int rank, size;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	printf("rank %d of %d\n", rank, size);
	fflush(stdout);
	for (long i = 0; i < iterations; i++) {
		unsigned long mine = (unsigned long)(rank + 1) * (i + 1), sum;
		int left = (rank + size - 1) % size, right = (rank + 1) % size;

		MPI_Allreduce(&mine, &sum, 1, MPI_UNSIGNED_LONG, MPI_SUM, MPI_COMM_WORLD);
		if (sum != (unsigned long)(i + 1) * size * (size + 1) / 2)
			fail("sum", rank, i);
		for (int k = 0; k < count; k++)
			out[k] = rank * 1e6 + i + k * 0.5;
		MPI_Sendrecv(out, count, MPI_DOUBLE, right, 1, in, count, MPI_DOUBLE, left, 1, MPI_COMM_WORLD,
			     MPI_STATUS_IGNORE);
		for (int k = 0; k < count; k++)
			if (in[k] != left * 1e6 + i + k * 0.5)
				fail("message", rank, i);
		total = total * 31 + sum;
		if (rank == 0 && i % 50 == 0) {
			printf("iteration %ld of %ld\n", i, iterations);
			fflush(stdout);
		}
		usleep(pause_us);
	}
	if (rank == 0)
		printf("RESULT %lu\n", total);
	MPI_Finalize();
	return 0;
}
