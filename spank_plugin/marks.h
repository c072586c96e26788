// SPDX-License-Identifier: Apache-2.0
// Marks of an image's chunks: whether one is zero, else its GMAC (docs/format.md, section 2.5). Used by chunks.c and copier.c.
#pragma once

#include <openssl/evp.h>
#include <stdint.h>

enum kind { ZERO, RAW, LZ4 };
enum { KEY_BYTES = 32, NONCE_BYTES = 12, TAG_BYTES = 16, CHUNK_BYTES = 1 << 20 };

// A chunk that began in the part before this one is in two places: its first bytes are at `plain`, the others at `rest`.
// length: bytes stored. tag: its mark, then what its seal made.
struct chunk {
	const unsigned char *plain, *rest;
	uint32_t first, size, length;
	uint8_t kind, skip;
	uint8_t unused[2];
	unsigned char tag[TAG_BYTES];
};

// AES-256-GCM under a key, to be used again and again; NULL without it.
EVP_CIPHER_CTX *chunk_cipher(const unsigned char *key, int encrypt);

// Sets tag to the GMAC under a fixed nonce; whether that worked.
int chunk_gmac(EVP_CIPHER_CTX *context, struct chunk *c);

// Sets kind (ZERO, RAW), and tag if it is not zero; whether that worked.
int chunk_mark(EVP_CIPHER_CTX *context, struct chunk *c);
