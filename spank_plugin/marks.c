// SPDX-License-Identifier: Apache-2.0
#include "marks.h"

#include <string.h>

EVP_CIPHER_CTX *chunk_cipher(const unsigned char *key, int encrypt)
{
	EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
	if (context && EVP_CipherInit_ex(context, EVP_aes_256_gcm(), NULL, key, NULL, encrypt))
		return context;
	EVP_CIPHER_CTX_free(context);
	return NULL;
}

// The tag of data that is authenticated only.
int chunk_gmac(EVP_CIPHER_CTX *context, struct chunk *c)
{
	static const unsigned char nonce[NONCE_BYTES];
	int count;
	return EVP_EncryptInit_ex(context, NULL, NULL, NULL, nonce) && EVP_EncryptUpdate(context, NULL, &count, c->plain, c->first) &&
	       (c->first == c->size || EVP_EncryptUpdate(context, NULL, &count, c->rest, c->size - c->first)) &&
	       EVP_EncryptFinal_ex(context, c->tag, &count) && EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, TAG_BYTES, c->tag);
}

static int is_zero(const unsigned char *data, size_t size)
{
	return !size || (!*data && !memcmp(data, data + 1, size - 1));
}

int chunk_mark(EVP_CIPHER_CTX *context, struct chunk *c)
{
	c->kind = is_zero(c->plain, c->first) && is_zero(c->rest, c->size - c->first) ? ZERO : RAW;
	return c->kind == ZERO || chunk_gmac(context, c);
}
