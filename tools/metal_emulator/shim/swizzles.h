// Members of the unions in vectors.h: the swizzles of vectors of 2, 3 and 4 elements.
#define MTL_SWZ2              \
  Swz<T, 2, 0, 0> xx;         \
  Swz<T, 2, 0, 1> xy;         \
  Swz<T, 2, 1, 0> yx;         \
  Swz<T, 2, 1, 1> yy;         \
  Swz<T, 3, 0, 0, 0> xxx;     \
  Swz<T, 3, 1, 1, 1> yyy;     \
  Swz<T, 4, 0, 0, 0, 0> xxxx; \
  Swz<T, 4, 1, 1, 1, 1> yyyy;
#define MTL_SWZ3              \
  Swz<T, 2, 0, 0> xx;         \
  Swz<T, 2, 0, 1> xy;         \
  Swz<T, 2, 0, 2> xz;         \
  Swz<T, 2, 1, 0> yx;         \
  Swz<T, 2, 1, 1> yy;         \
  Swz<T, 2, 1, 2> yz;         \
  Swz<T, 2, 2, 0> zx;         \
  Swz<T, 2, 2, 1> zy;         \
  Swz<T, 2, 2, 2> zz;         \
  Swz<T, 3, 0, 0, 0> xxx;     \
  Swz<T, 3, 0, 1, 2> xyz;     \
  Swz<T, 3, 0, 2, 1> xzy;     \
  Swz<T, 3, 1, 0, 2> yxz;     \
  Swz<T, 3, 1, 1, 1> yyy;     \
  Swz<T, 3, 1, 2, 0> yzx;     \
  Swz<T, 3, 2, 0, 1> zxy;     \
  Swz<T, 3, 2, 1, 0> zyx;     \
  Swz<T, 3, 2, 2, 2> zzz;     \
  Swz<T, 4, 0, 0, 0, 0> xxxx; \
  Swz<T, 4, 1, 1, 1, 1> yyyy; \
  Swz<T, 4, 2, 2, 2, 2> zzzz;
#define MTL_SWZ4              \
  Swz<T, 2, 0, 0> xx;         \
  Swz<T, 2, 0, 1> xy;         \
  Swz<T, 2, 0, 2> xz;         \
  Swz<T, 2, 0, 3> xw;         \
  Swz<T, 2, 1, 0> yx;         \
  Swz<T, 2, 1, 1> yy;         \
  Swz<T, 2, 1, 2> yz;         \
  Swz<T, 2, 1, 3> yw;         \
  Swz<T, 2, 2, 0> zx;         \
  Swz<T, 2, 2, 1> zy;         \
  Swz<T, 2, 2, 2> zz;         \
  Swz<T, 2, 2, 3> zw;         \
  Swz<T, 2, 3, 0> wx;         \
  Swz<T, 2, 3, 1> wy;         \
  Swz<T, 2, 3, 2> wz;         \
  Swz<T, 2, 3, 3> ww;         \
  Swz<T, 3, 0, 0, 0> xxx;     \
  Swz<T, 3, 0, 1, 2> xyz;     \
  Swz<T, 3, 0, 1, 3> xyw;     \
  Swz<T, 3, 0, 2, 1> xzy;     \
  Swz<T, 3, 0, 2, 3> xzw;     \
  Swz<T, 3, 0, 3, 1> xwy;     \
  Swz<T, 3, 0, 3, 2> xwz;     \
  Swz<T, 3, 1, 0, 2> yxz;     \
  Swz<T, 3, 1, 0, 3> yxw;     \
  Swz<T, 3, 1, 1, 1> yyy;     \
  Swz<T, 3, 1, 2, 0> yzx;     \
  Swz<T, 3, 1, 2, 3> yzw;     \
  Swz<T, 3, 1, 3, 0> ywx;     \
  Swz<T, 3, 1, 3, 2> ywz;     \
  Swz<T, 3, 2, 0, 1> zxy;     \
  Swz<T, 3, 2, 0, 3> zxw;     \
  Swz<T, 3, 2, 1, 0> zyx;     \
  Swz<T, 3, 2, 1, 3> zyw;     \
  Swz<T, 3, 2, 2, 2> zzz;     \
  Swz<T, 3, 2, 3, 0> zwx;     \
  Swz<T, 3, 2, 3, 1> zwy;     \
  Swz<T, 3, 3, 0, 1> wxy;     \
  Swz<T, 3, 3, 0, 2> wxz;     \
  Swz<T, 3, 3, 1, 0> wyx;     \
  Swz<T, 3, 3, 1, 2> wyz;     \
  Swz<T, 3, 3, 2, 0> wzx;     \
  Swz<T, 3, 3, 2, 1> wzy;     \
  Swz<T, 3, 3, 3, 3> www;     \
  Swz<T, 4, 0, 0, 0, 0> xxxx; \
  Swz<T, 4, 0, 1, 2, 3> xyzw; \
  Swz<T, 4, 0, 1, 3, 2> xywz; \
  Swz<T, 4, 0, 2, 1, 3> xzyw; \
  Swz<T, 4, 0, 2, 3, 1> xzwy; \
  Swz<T, 4, 0, 3, 1, 2> xwyz; \
  Swz<T, 4, 0, 3, 2, 1> xwzy; \
  Swz<T, 4, 1, 0, 2, 3> yxzw; \
  Swz<T, 4, 1, 0, 3, 2> yxwz; \
  Swz<T, 4, 1, 1, 1, 1> yyyy; \
  Swz<T, 4, 1, 2, 0, 3> yzxw; \
  Swz<T, 4, 1, 2, 3, 0> yzwx; \
  Swz<T, 4, 1, 3, 0, 2> ywxz; \
  Swz<T, 4, 1, 3, 2, 0> ywzx; \
  Swz<T, 4, 2, 0, 1, 3> zxyw; \
  Swz<T, 4, 2, 0, 3, 1> zxwy; \
  Swz<T, 4, 2, 1, 0, 3> zyxw; \
  Swz<T, 4, 2, 1, 3, 0> zywx; \
  Swz<T, 4, 2, 2, 2, 2> zzzz; \
  Swz<T, 4, 2, 3, 0, 1> zwxy; \
  Swz<T, 4, 2, 3, 1, 0> zwyx; \
  Swz<T, 4, 3, 0, 1, 2> wxyz; \
  Swz<T, 4, 3, 0, 2, 1> wxzy; \
  Swz<T, 4, 3, 1, 0, 2> wyxz; \
  Swz<T, 4, 3, 1, 2, 0> wyzx; \
  Swz<T, 4, 3, 2, 0, 1> wzxy; \
  Swz<T, 4, 3, 2, 1, 0> wzyx; \
  Swz<T, 4, 3, 3, 3, 3> wwww;
