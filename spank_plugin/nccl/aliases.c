/* SPDX-License-Identifier: Apache-2.0 */
/* Every function of NCCL has a second name, which profilers call from functions of the first: ours has both, too. */
#include "state.h"

#define F(name, result, parameters, arguments) \
	result name parameters; \
	__attribute__((visibility("default"))) result p##name parameters { return name arguments; }
NCCL_WRAPPED(F)
