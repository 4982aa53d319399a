// A stream of batches through a compiled file: every output next.X becomes the input X of the
// next batch. A stream starts from zeros of the declared shapes.
#pragma once
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <string>
#include <vector>

class Stream {
 public:
  std::vector<int64_t> shape;  // of a batch of images; -1 for open sizes

  Stream(Ort::Env& env, const char* path) : session_(env, path, Ort::SessionOptions{}) {
    Ort::AllocatorWithDefaultOptions cpu;
    for (size_t i = 0; i < session_.GetInputCount(); ++i) {  // images, then the state
      inputs_.push_back(session_.GetInputNameAllocated(i, cpu).get());
      auto type = session_.GetInputTypeInfo(i);
      auto info = type.GetTensorTypeAndShapeInfo();
      auto sizes = info.GetShape();
      if (i == 0) shape = sizes;
      if (i > 0) outputs_.push_back("next." + inputs_[i]);
      std::replace(sizes.begin(), sizes.end(), int64_t{-1}, int64_t{0});
      auto value = Ort::Value::CreateTensor(cpu, sizes.data(), sizes.size(), info.GetElementType());
      size_t width = info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL ? 1
                   : info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 8;
      size_t count = value.GetTensorTypeAndShapeInfo().GetElementCount();
      std::fill_n(static_cast<char*>(value.GetTensorMutableRawData()), count * width, 0);
      values_.push_back(std::move(value));
    }
  }

  std::vector<Ort::Value> run(Ort::Value images) {  // labels, accepted, ratio, reason, ...
    std::vector<const char*> in, out;
    for (auto& name : inputs_) in.push_back(name.c_str());
    for (auto& name : outputs_) out.push_back(name.c_str());
    values_[0] = std::move(images);
    auto found = session_.Run(Ort::RunOptions{}, in.data(), values_.data(), in.size(), out.data(),
                              out.size());
    std::move(found.begin() + 4, found.end(), values_.begin() + 1);
    found.erase(found.begin() + 4, found.end());
    return found;
  }

 private:
  Ort::Session session_;
  std::vector<std::string> inputs_, outputs_{"labels", "accepted", "ratio", "reason"};
  std::vector<Ort::Value> values_;
};
