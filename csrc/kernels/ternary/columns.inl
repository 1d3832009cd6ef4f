// placeholder until the vector form arrives
void column_product(const ColumnJob& job) {
  for (int64_t panel = 0; panel < job.panels; ++panel) {
    int32_t* out = job.out + panel * layout::kColumnRows;
    for (int64_t i = 0; i < layout::kColumnRows; ++i) out[i] = -job.x_sum;
    const uint8_t* columns = job.columns + panel * job.k * layout::kColumnBytes;
    for (int64_t j = 0; j < job.count; ++j) {
      const uint8_t* line = columns + job.at[j] * layout::kColumnBytes;
      for (int f = 0; f < 4; ++f)
        for (int r = 0; r < 64; ++r) out[64 * f + r] += job.x[j] * ((line[r] >> (2 * f)) & 3);
    }
  }
}
int64_t list_nonzero(const int8_t* q, int64_t n, int32_t* at, int8_t* x) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    at[count] = static_cast<int32_t>(i);
    x[count] = q[i];
    count += q[i] != 0;
  }
  for (int64_t i = count; i % 4 != 0; ++i) {
    at[i] = 0;
    x[i] = 0;
  }
  return count;
}
