//! Classes, attributes and refusals, which need no device.

use super::*;

#[test]
fn classes_hold_their_rows_and_are_few() {
    let mut classes = std::collections::BTreeSet::new();
    for rows in 1..=8192 {
        let most = most_rows(rows);
        assert!(most >= rows, "{rows} in {most}");
        assert!(
            most <= rows.next_multiple_of(16).max(rows * 5 / 4 + 1),
            "{rows} in {most}"
        );
        assert_eq!(most_rows(most), most, "{rows}");
        classes.insert(most);
    }
    assert!(classes.len() <= 36, "{} classes", classes.len());
}

#[test]
fn one_class_has_every_number_of_rows_where_a_rows_bits_must_not_depend_on_it() {
    let class = |m| Class::of(GemmShape::new(m, 576, 1536, GemmDtype::Bf16), true, 256);
    assert_ne!(class(1), class(300));
    assert_eq!(class(1).of_any_rows(), class(300).of_any_rows());
    assert!(class(1).of_any_rows().any_rows && !class(1).of_any_rows().exact);
    // Other columns, dtypes and strides have algorithms of their own, as ever.
    let wide = GemmShape::new(1, 577, 1536, GemmDtype::Bf16);
    assert_ne!(
        class(1).of_any_rows(),
        Class::of(wide, true, 256).of_any_rows()
    );
}

#[test]
fn the_library_is_found_and_takes_every_attribute_or_is_named_with_where_it_was_looked_for() {
    match load_library() {
        Ok(()) => {
            for output in [cudaDataType_t::CUDA_R_16BF, cudaDataType_t::CUDA_R_32F] {
                assert_eq!(Desc::new(true, output).map(drop), Ok(()));
            }
            assert_eq!(
                Layout::new(cudaDataType_t::CUDA_R_16F, 64, 3, 96).map(drop),
                Ok(())
            );
            assert_eq!(
                Preference::new(USUAL_WORKSPACE, 16, false).map(drop),
                Ok(())
            );
            assert_eq!(Preference::new(0, 16, true).map(drop), Ok(()));
        }
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.starts_with("libcublasLt.so.13 was not found: looked in the loader's paths"),
                "{text}"
            );
            assert!(
                text.contains("TIMETABLE_CUDA_LIBRARY_PATH")
                    && text.contains("python3's nvidia packages"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_shape_that_makes_no_sense_is_refused_with_its_numbers() {
    let shape = GemmShape::new(4, 0, 8, GemmDtype::Bf16);
    assert!(shape.check().is_err());
    let shape = GemmShape {
        out_stride: 7,
        ..GemmShape::new(4, 8, 16, GemmDtype::F16)
    };
    let error = shape.check().unwrap_err().to_string();
    assert!(
        error.contains(
            "[4, 16] F16 by [8, 16] to F16, row strides 16 and 7: x_stride is at least k"
        ),
        "{error}"
    );
    assert_eq!(GemmShape::new(0, 8, 16, GemmDtype::F32).check(), Ok(()));
}

#[test]
fn alignment_is_that_of_the_least_aligned_operand() {
    let shape = GemmShape {
        out: GemmOut::F32,
        ..GemmShape::new(4, 8, 16, GemmDtype::Bf16)
    };
    let mut operands = GemmOperands {
        x: DevicePtr::from_raw(0x1000),
        weight: DevicePtr::from_raw(0x2000),
        bias: None,
        out: DevicePtr::from_raw(0x3000),
    };
    assert_eq!(alignment(shape, operands), Ok(256));
    operands.x = DevicePtr::from_raw(0x1020);
    assert_eq!(alignment(shape, operands), Ok(16));
    operands.x = DevicePtr::from_raw(0x1002);
    assert_eq!(alignment(shape, operands), Ok(2));
    operands.out = DevicePtr::from_raw(0x3002);
    assert!(alignment(shape, operands).is_err());
    operands.out = DevicePtr::NULL;
    assert!(alignment(shape, operands).is_err());
}
