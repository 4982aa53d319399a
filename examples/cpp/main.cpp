// Classify images with an adaptive model: ./predict adaptive.onnx images.f32 [batch size]
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "stream.hpp"

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: predict MODEL IMAGES [BATCH SIZE]\n"), 2;
  Ort::Env env;
  Stream stream(env, argv[1]);
  auto cpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  auto shape = stream.shape;  // of a batch: its images have fixed sizes
  size_t pixels = 1;
  for (size_t i = 1; i < shape.size(); ++i) pixels *= static_cast<size_t>(shape[i]);
  std::vector<float> batch((argc > 3 ? std::atoi(argv[3]) : 64) * pixels);
  std::ifstream file(argv[2], std::ios::binary);
  const auto bytes = static_cast<std::streamsize>(batch.size() * sizeof(float));
  while (file.read(reinterpret_cast<char*>(batch.data()), bytes), file.gcount() > 0) {
    shape[0] = file.gcount() / static_cast<int64_t>(pixels * sizeof(float));
    auto out = stream.run(Ort::Value::CreateTensor<float>(
        cpu, batch.data(), static_cast<size_t>(shape[0]) * pixels, shape.data(), shape.size()));
    const bool accepted = *out[1].GetTensorData<bool>();
    std::printf("%s, ratio %.3f, reason %d:", accepted ? "accepted" : "rejected",
                *out[2].GetTensorData<float>(), static_cast<int>(*out[3].GetTensorData<int64_t>()));
    for (int64_t i = 0; i < shape[0]; ++i)
      std::printf(" %d", static_cast<int>(out[0].GetTensorData<int64_t>()[i]));
    std::printf("\n");
  }
}
