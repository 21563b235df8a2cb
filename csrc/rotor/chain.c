#include "chain.h"

#include <string.h>

static int check_values(const int64_t *values, int64_t count, int negative, int64_t *bad) {
    for (int64_t i = 0; i < count; i++) {
        if (values[i] < 0 || values[i] > ROTOR_MAX_VALUE) {
            *bad = i;
            return values[i] < 0 ? negative : ROTOR_ERR_TOO_LARGE;
        }
    }
    return ROTOR_OK;
}

static int chain_check(const rotor_chain_t *c, int64_t *bad) {
    int ret;

    *bad = -1;
    if (c->n < 1) {
        return ROTOR_ERR_BAD_LENGTH;
    }
    if (c->n > (INT64_C(1) << 18)) {
        return ROTOR_ERR_TOO_LARGE;
    }
    enum { SIZES = 6, VALUES = 8 };
    const int64_t *values[VALUES] = {c->x,    c->xbar,  c->fe_tmp,     c->fn_tmp,
                                     c->grad, c->pgrad, c->forward_ns, c->backward_ns};
    for (int k = 0; k < VALUES; k++) {
        bool is_longer = values[k] == c->x || values[k] == c->grad;
        int negative = k < SIZES ? ROTOR_ERR_NEGATIVE_SIZE : ROTOR_ERR_NEGATIVE_TIME;
        if ((ret = check_values(values[k], c->n + is_longer, negative, bad)) != ROTOR_OK) {
            return ret;
        }
    }
    for (int64_t i = 0; i < c->n; i++) {
        if (c->b_tmp[i] < -c->grad[i] || c->b_tmp[i] > ROTOR_MAX_VALUE) {
            *bad = i;
            return c->b_tmp[i] < 0 ? ROTOR_ERR_BACKWARD_TMP : ROTOR_ERR_TOO_LARGE;
        }
    }
    if (c->loss_tmp < -c->grad[c->n] || c->loss_tmp > ROTOR_MAX_VALUE) {
        *bad = c->n;
        return c->loss_tmp < 0 ? ROTOR_ERR_BACKWARD_TMP : ROTOR_ERR_TOO_LARGE;
    }
    return ROTOR_OK;
}

static int64_t *chain_place(int64_t **cursor, const int64_t *source, int64_t count) {
    int64_t *array = *cursor;
    if (source != NULL) {
        memcpy(array, source, (size_t)count * sizeof(*array));
    }
    *cursor += count;
    return array;
}

int rotor_chain_init(rotor_chain_t *self, const rotor_chain_t *source, int64_t *bad) {
    int ret;
    int64_t n = source->n;
    int64_t *cursor;

    memset(self, 0, sizeof(*self));
    if ((ret = chain_check(source, bad)) != ROTOR_OK) {
        return ret;
    }
    self->block = rotor_malloc_array(12 * n + 4, sizeof(int64_t));
    if (self->block == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    cursor = self->block;
    self->n = n;
    self->loss_tmp = source->loss_tmp;
    self->hold_output = source->hold_output;
    self->forward_ns = chain_place(&cursor, source->forward_ns, n);
    self->backward_ns = chain_place(&cursor, source->backward_ns, n);
    self->x = chain_place(&cursor, source->x, n + 1);
    self->xbar = chain_place(&cursor, source->xbar, n);
    self->fe_tmp = chain_place(&cursor, source->fe_tmp, n);
    self->fn_tmp = chain_place(&cursor, source->fn_tmp, n);
    self->b_tmp = chain_place(&cursor, source->b_tmp, n);
    self->grad = chain_place(&cursor, source->grad, n + 1);
    self->pgrad = chain_place(&cursor, source->pgrad, n);
    self->once = chain_place(&cursor, source->once, n);
    if (source->once == NULL) {
        memset(self->once, 0, (size_t)n * sizeof(*self->once));
    }
    self->forward_sum = chain_place(&cursor, NULL, n + 1);
    self->pgrad_after = chain_place(&cursor, NULL, n + 1);
    self->forward_sum[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        self->forward_sum[i + 1] = self->forward_sum[i] + self->forward_ns[i];
    }
    self->pgrad_after[n] = 0;
    for (int64_t l = n - 1; l >= 0; l--) {
        self->pgrad_after[l] = self->pgrad_after[l + 1] + (l + 1 < n ? self->pgrad[l + 1] : 0);
    }
    return ROTOR_OK;
}

void rotor_chain_free(rotor_chain_t *self) {
    rotor_free(self->block);
    memset(self, 0, sizeof(*self));
}

int64_t rotor_chain_ideal_ns(const rotor_chain_t *self) {
    int64_t total = self->forward_sum[self->n];
    for (int64_t i = 0; i < self->n; i++) {
        total += self->backward_ns[i];
    }
    return total;
}

bool rotor_chain_times_fit(const rotor_chain_t *self) {
    int64_t longest = rotor_chain_ideal_ns(self);
    return self->forward_sum[self->n] <= (ROTOR_NEVER - longest) / (4 * (self->n + 2));
}

int64_t rotor_chain_held(const rotor_chain_t *self, int64_t l) {
    if (l == self->n) {
        return 0;
    }
    return self->grad[l + 1] + self->pgrad_after[l] + (self->hold_output ? self->x[self->n] : 0);
}

int64_t rotor_chain_need_fe(const rotor_chain_t *self, int64_t i, int64_t l) {
    return rotor_chain_held(self, l) + self->xbar[i] + self->fe_tmp[i];
}

int64_t rotor_chain_need_fn(const rotor_chain_t *self, int64_t i, int64_t l, int64_t k) {
    int64_t input = k == i ? 0 : self->x[k];
    if (self->once[k] != 0) {
        return ROTOR_NEVER;
    }
    return rotor_chain_held(self, l) + input + self->x[k + 1] + self->fn_tmp[k];
}

int64_t rotor_chain_need_b(const rotor_chain_t *self, int64_t i, int64_t l) {
    /* The first Fe(n-1) holds the output inside its xbar; any other time the output is a storage of its own. */
    bool inside = i == self->n - 1 && l == self->n;
    int64_t output = self->hold_output && !inside ? self->x[self->n] : 0;
    return self->grad[i + 1] + self->xbar[i] + self->grad[i] + self->b_tmp[i] +
           self->pgrad_after[i] + output;
}

int64_t rotor_chain_need_tape(const rotor_chain_t *self, int64_t i, int64_t l) {
    return rotor_max(rotor_chain_need_fe(self, i, l), rotor_chain_need_b(self, i, l));
}

int64_t rotor_chain_need_loss(const rotor_chain_t *self) {
    return self->grad[self->n] + self->loss_tmp;
}

int64_t rotor_discretise(int64_t bytes, int64_t budget, int64_t slots) {
    /* bytes = q * budget + r, 0 <= r < budget: only r * slots needs more than 64 bits. */
    int64_t q = bytes / budget;
    int64_t r = bytes % budget;
    if (r < 0) {
        q--;
        r += budget;
    }
    if (q > 0 && q >= INT64_MAX / slots) {
        return INT64_MAX;
    }
    unsigned __int128 scaled = (unsigned __int128)r * (unsigned __int128)slots;
    unsigned __int128 up = (scaled + (unsigned __int128)budget - 1) / (unsigned __int128)budget;
    return q * slots + (int64_t)up;
}
